"""What one request may ask for, and how large a message may be."""

from __future__ import annotations

from dataclasses import dataclass

MAX_MESSAGE_BYTES = 16 * 2**20  # KV never rides gRPC: a prompt of a million token ids takes 4 MiB


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that a node sets; what the model bounds (context, vocabulary) is in the ModelCard.

    max_chars_per_token: a text of more characters than this times the context is refused before it is tokenized, as
    tokenizing costs time and memory in proportion.
    stalled_write_s: how long a reader may take none of its answer before the request is aborted.
    """

    default_max_new_tokens: int = 2048
    max_samples: int = 16
    max_stop_strings: int = 16
    max_stop_chars: int = 256
    max_stop_token_ids: int = 64
    max_logit_bias: int = 300
    max_top_logprobs: int = 20
    max_request_id_chars: int = 128
    max_chat_messages: int = 1024
    max_chars_per_token: int = 16
    stalled_write_s: float = 60.0


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The served model, as far as a caller may know it.

    max_model_len: tokens of prompt and answer together; never more than the node's KV pool can hold.
    """

    served_name: str
    architecture: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    revision: str = ""
    dtype: str = "float32"

    @property
    def max_prompt_tokens(self) -> int:
        return self.max_model_len - 1
