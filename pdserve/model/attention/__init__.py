"""Paged attention backends, and which one this machine gets."""

from __future__ import annotations

import logging
from pathlib import Path

from pdserve.kv.storage import KVStorage
from pdserve.model.attention.base import Attention
from pdserve.model.attention.native_cpu import NativeAttention
from pdserve.model.attention.torch_cpu import TorchAttention
from pdserve.model.native_build import NativeUnavailable

logger = logging.getLogger(__name__)

__all__ = ["Attention", "build_attention"]


def build_attention(storage: KVStorage, num_heads: int, cache_dir: Path, compiler: str = "cc") -> Attention:
    """The native kernel (kept in `cache_dir`/native), or torch's slower one where it can't be had, with one log line.

    num_heads: query heads, a multiple of the layout's kv heads.
    """
    try:
        return NativeAttention(storage, num_heads, cache_dir / "native", compiler)
    except NativeUnavailable as reason:
        logger.warning("native attention is not available, the slower torch one is used: %s", reason)
        return TorchAttention(storage, num_heads)
