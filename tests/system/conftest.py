"""A tiny model with random weights, and the nodes that tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from pdserve.bench.tiny_model import QUICK
from pdserve.bench.tiny_model import make_model as make_quick_model
from pdserve.config import Role
from tests.system.nodes import Node, Nodes

transformers = pytest.importorskip("transformers")

NUM_BYTES = 256
EOS, VOCAB_SIZE = NUM_BYTES, 288
TINY_LLAMA = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 16384,
    "bos_token_id": None,
    "eos_token_id": EOS,
    # Wide enough that the best token leads clearly: rounding must not decide.
    "initializer_range": 0.15,
}

TINY_MIXTRAL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 16384,
    "sliding_window": None,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "initializer_range": 0.15,
}

Pair = tuple[Node, Node]
Greedy = Callable[[Sequence[int], int], tuple[int, ...]]


def byte_tokenizer() -> tokenizers.Tokenizer:
    """One token a byte, and an end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={text: at for at, text in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def make_model(directory: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY_LLAMA)).save_pretrained(directory)
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """The nodes need the cores more than the reference does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny"), seed=3)


@pytest.fixture(scope="session")
def tiny_greedy(tiny_model: Path) -> Greedy:
    """What transformers generates with the tiny model's weights."""
    return reference(tiny_model)


@pytest.fixture(scope="session")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny mixture of experts, with random weights."""
    directory = tmp_path_factory.mktemp("mixtral")
    torch.manual_seed(5)
    transformers.MixtralForCausalLM(transformers.MixtralConfig(**TINY_MIXTRAL)).save_pretrained(directory)
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="session")
def mixtral_greedy(mixtral: Path) -> Greedy:
    return reference(mixtral)


def reference(directory: str | Path) -> Greedy:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def greedy(prompt: Sequence[int], max_new_tokens: int) -> tuple[int, ...]:
        with torch.inference_mode():
            ids = model.generate(
                torch.tensor([list(prompt)]), do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=0
            )
        return tuple(ids[0, len(prompt) :].tolist())

    return greedy


@pytest.fixture(scope="session")
def shared_nodes(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """For nodes that live as long as the run."""
    nodes = Nodes(str(tiny_model), tmp_path_factory.mktemp("shared-nodes"))
    try:
        yield nodes
    finally:
        nodes.end()


@pytest.fixture
def nodes(tiny_model: Path, tmp_path: Path) -> Iterator[Nodes]:
    """For nodes of one test."""
    nodes = Nodes(str(tiny_model), tmp_path)
    try:
        yield nodes
    finally:
        nodes.end()


@pytest.fixture(scope="session")
def fused(shared_nodes: Nodes) -> Node:
    return shared_nodes.start(Role.FUSED)


@pytest.fixture(scope="session")
def quick_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Nodes of a model that is big enough for its KV to take its time."""
    folder = tmp_path_factory.mktemp("quick-nodes")
    nodes = Nodes(str(make_quick_model(folder / "model", QUICK)), folder)
    try:
        yield nodes
    finally:
        nodes.end()


@pytest.fixture(scope="session")
def whole(quick_nodes: Nodes) -> Node:
    """A fused node of that model: what the others must answer."""
    return quick_nodes.start(Role.FUSED)


# UCX reads its transports once a process. By default one host copies straight between processes; tcp is what two do.
TRANSPORTS = {"default": None, "tcp": "tcp,self"}
# Copies between processes are over within a call, which hides every race: the failure matrix counts over tcp, and its
# other half is for `make soak-handoff`.
MATRIX_TRANSPORTS = ("tcp", pytest.param("default", marks=pytest.mark.soak))
over_both = pytest.mark.parametrize(
    "ucx_tls", [pytest.param(TRANSPORTS["tcp"], id="tcp"), pytest.param(None, id="default", marks=pytest.mark.soak)]
)


@pytest.fixture(scope="session")
def pair_by_default(shared_nodes: Nodes) -> Pair:
    """A prefill and a decode node."""
    return shared_nodes.start_pair()


@pytest.fixture(scope="session")
def pair_by_tcp(shared_nodes: Nodes) -> Pair:
    return shared_nodes.start_pair(ucx_tls=TRANSPORTS["tcp"])


@pytest.fixture(params=TRANSPORTS)
def pair(request: pytest.FixtureRequest) -> Pair:
    """A prefill and a decode node, over each transport."""
    pair: Pair = request.getfixturevalue(f"pair_by_{request.param}")
    return pair
