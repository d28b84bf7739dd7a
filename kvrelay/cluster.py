"""Members of a cluster: what a node says of itself, and what the coordinator makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvrelay.kv.layout import KVLayout
from kvrelay.limits import DecodeLimits, PrefillLimits
from kvrelay.types import BlockCounts, BlockHash, InstanceId, Role


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a node serves. `fingerprint` is a content hash of weights, config and tokenizer, in hex."""

    name: str
    fingerprint: str
    architecture: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    layout: KVLayout
    dtype: str
    attention_backend: str


@dataclass(frozen=True, slots=True)
class ListedModel:
    """What a coordinator serves under a name; `info` is None while no node of it has joined."""

    name: str
    info: ModelInfo | None
    ready: bool


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """How a process introduces itself to the coordinator; `model` is set by prefill and decode nodes."""

    role: Role
    instance_id: InstanceId
    address: str
    model: ModelInfo | None
    protocol_version: int = 1


@dataclass(frozen=True, slots=True)
class NodeRates:
    """What a node that computes measured of itself, over its last work; 0 where it measured nothing yet."""

    prefill_tokens_per_s: float = 0.0
    handoff_bytes_per_s: float = 0.0
    store_bytes_per_s: float = 0.0
    step_s: float = 0.0  # a decode step takes step_s + step_row_s x sequences
    step_row_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeStatus:
    ready: bool = False
    draining: bool = False
    blocks: BlockCounts = BlockCounts()
    num_running: int = 0
    num_waiting: int = 0
    num_slots_free: int = 0
    num_reservations: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    limits: DecodeLimits | PrefillLimits | None = None  # in force now, of a node that computes
    not_ready_reason: str = ""  # for people; empty while it is ready
    rates: NodeRates = NodeRates()
    num_waiting_tokens: int = 0  # of prompts, uncached: what a new one stands behind
    step_tokens: int = 0  # of prompts, that its next step computes at most; 0: not told
    prompt_tokens: tuple[int, ...] = ()  # of num_waiting_tokens, each prompt's, oldest first; empty: not told
    weight: float = 1.0  # its part of the requests beside other nodes' weights; 0: none


@dataclass(frozen=True, slots=True)
class CacheStored:
    """These can be found by their hashes on the node now; those of one chain stand in its order."""

    hashes: Sequence[BlockHash]


@dataclass(frozen=True, slots=True)
class CacheRemoved:
    """These cannot any more."""

    hashes: Sequence[BlockHash]


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """None can any more: what the node has is told anew from here on."""


CacheEvent: TypeAlias = CacheStored | CacheRemoved | CacheCleared


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """What became of a node's cached blocks. `first_sequence` numbers the first of `events`, the next has the next."""

    first_sequence: int
    events: tuple[CacheEvent, ...]


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One member as the coordinator sees it; `age_s` since its last status."""

    info: NodeInfo
    status: NodeStatus
    age_s: float


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    nodes: tuple[NodeReport, ...]
    num_queued: int
    num_running: int
    ready: bool
