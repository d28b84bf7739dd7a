"""What every role can be told, and what prefill and decode nodes can."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvrelay.address import MAX_PORT
from kvrelay.limits import MAX_WEIGHT, QueueMarks
from kvrelay.option import option

JOIN_HELP = "coordinators to join, host:port with commas between; none: serve without a cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleConfig:
    """What every role has."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for every interface")
    port: int = option(0, "port of the gRPC services; 0 takes any free one", minimum=0, maximum=MAX_PORT)
    advertise: str = option("", "host or host:port that others are told; default: what it listens on")
    metrics_port: int = option(
        -1, "port of the Prometheus metrics over HTTP; 0 takes any free one, -1 is off", minimum=-1, maximum=MAX_PORT
    )
    log_level: str = option("info", "least severe messages to log", choices=("debug", "info", "warning", "error"))
    log_format: str = option("text", "one line of text or one JSON object a message", choices=("text", "json"))
    peer_ca: str = option(
        "",
        "CA that signs the certificates of all roles: with peer_cert and peer_key roles speak mutual TLS; none: in the "
        "clear",
        unit="file",
    )
    peer_cert: str = option("", "this role's certificate, for the host that others reach it by", unit="file")
    peer_key: str = option("", "the key of peer_cert", unit="file")
    grace_s: float = option(30.0, "time running requests get to finish after SIGTERM", unit="s", minimum=0)

    def check(self) -> None:
        """Raises ConfigError where fields contradict each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig(RoleConfig):
    """What prefill and decode nodes have in common."""

    model: Path = option(help="a GGUF file or a Hugging Face directory")
    model_name: str = option(
        "",
        "name of what this node serves; where its coordinators serve several models, which one; default: the file's",
    )
    dtype: str = option("bfloat16", "type of weights, KV and computation", choices=("bfloat16", "float16", "float32"))
    weights: str = option(
        "file",
        "of a GGUF file: file computes with quantised ones as they are where that is possible (least memory, quick for "
        "small batches), dtype turns all into dtype when the model is loaded, both keeps both (quick throughout). In "
        "bfloat16 only dtype gives the same tokens whatever else runs: with file and both logits depend in their last "
        "bits on how many rows a step has",
        choices=("file", "dtype", "both"),
    )
    decoder: str = option(
        "auto",
        "native is the compiled decoder for CPUs, torch the plain one; auto takes the native one where it can serve",
        choices=("auto", "native", "torch"),
    )
    device: str = option("cpu", "where the model runs; auto prefers a GPU", choices=("cpu", "cuda", "auto"))
    threads: int = option(0, "threads of one computation; 0 takes every core", minimum=0)
    num_blocks: int = option(0, "KV blocks of the pool; 0 derives them from kv_bytes", minimum=0)
    kv_bytes: int = option(512 * 2**20, "memory of the KV pool", unit="bytes", minimum=1)
    block_tokens: int = option(16, "token positions of a block; the same on every node", minimum=1, maximum=1024)
    coordinator: tuple[str, ...] = option((), JOIN_HELP, unit="host:port")
    kvstore: tuple[str, ...] = option(
        (),
        "KV stores to share prefixes through, the same on every node; each has a share of the prompts. none: only this "
        "node's own",
        unit="store",
    )
    kvstore_replicas: int = option(1, "kvstores that keep each prompt's blocks, of those that are there", minimum=1)
    queue_low_s: float = option(
        0.03, "wait of newcomers for the step that runs, under which steps get longer again", unit="s", minimum=0.0
    )
    queue_high_s: float = option(
        0.1,
        "wait of newcomers for the step that runs, above which steps get shorter; 0: never",
        unit="s",
        minimum=0.0,
    )
    weight: float = option(
        1.0,
        "the node's part of the requests beside other nodes' weights, until `kvrelay weight` changes it; 0: it takes "
        "nothing new",
        minimum=0.0,
        maximum=MAX_WEIGHT,
    )
    watchdog_s: float = option(
        10.0, "longest step before the node calls itself stuck and gives its requests up", unit="s", minimum=0.1
    )

    @property
    def marks(self) -> QueueMarks | None:
        """None: no wait makes steps shorter."""
        return QueueMarks(self.queue_low_s, self.queue_high_s) if self.queue_high_s else None
