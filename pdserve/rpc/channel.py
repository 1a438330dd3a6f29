"""gRPC channel arguments that both ends share."""

from __future__ import annotations

from pdserve.rpc.limits import MAX_MESSAGE_BYTES

KEEPALIVE_TIME_MS = 30_000
KEEPALIVE_TIMEOUT_MS = 10_000
# A caller may ping this often before its connection is closed for it.
MIN_PING_INTERVAL_MS = 10_000

ChannelOptions = list[tuple[str, str | int]]


def channel_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> ChannelOptions:
    """Message size both ways; pings that find a dead connection, also while no call is open."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Nodes are addressed directly; a machine's web proxy knows nothing of them.
        ("grpc.enable_http_proxy", 0),
    ]


def server_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> ChannelOptions:
    """A port belongs to one server: with SO_REUSEPORT a second one would silently share its calls."""
    return [
        *channel_options(max_message_bytes),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.so_reuseport", 0),
    ]
