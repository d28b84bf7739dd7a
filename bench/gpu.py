"""How near a node's steps come to what the GPU can do: `make bench-gpu`, on a machine with one.

A Llama-3.1-8B-shaped model with random bfloat16 weights runs through the engine's own ModelRunner, sampling and all.
Decode is held against the memory bandwidth measured in the same run (weights and KV read once a step), or the rate of
matrix products where that is the limit; prefill against that rate. transformers' generate stands beside them.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench.random_llama import LLAMA_3_1_8B, TINY, num_weights, random_decoder
from bench.roofline import Roofline, best_time, measure_roofline, synchronize
from kvrelay.engine.batch import Batch, ScheduledRow
from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sequence import Sequence as EngineSequence
from kvrelay.kv.cache import PagedKVCache
from kvrelay.messages import NodeRequest
from kvrelay.model.config import ModelConfig
from kvrelay.model.graphs import with_graphs
from kvrelay.model.sampler import Sampler
from kvrelay.sampling import SamplingParams
from kvrelay.types import BlockHash, BlockId, RequestId

ITEM_BYTES = 2  # bfloat16
DECODE_BATCHES = (1, 8, 64, 256)
PREFILL_TOKENS = (512, 4096, 16_384)
NUM_DECODE_STEPS = 48
NUM_WARM_STEPS = 4


@dataclass(frozen=True, slots=True)
class Measurement:
    engine: str  # kvrelay or transformers
    kind: str  # decode or prefill
    size: int  # sequences, or tokens of the prompt
    tokens_per_s: float
    step_ms: float
    of_roofline: float  # 1 is the least time that the measured rates allow


class Bench:
    """One model on one device; `context` tokens lie in the cache before a row's first decode step."""

    def __init__(self, config: ModelConfig, device: str, roofline: Roofline, context: int, max_batch: int) -> None:
        self.config = config
        self._device = device
        self._roofline = roofline
        self._context = context
        self._layout = config.layout("bfloat16")
        room = context + NUM_DECODE_STEPS + NUM_WARM_STEPS + 1
        num_blocks = max(max_batch * self._layout.blocks_for(room), self._layout.blocks_for(config.max_model_len))
        cache = PagedKVCache(self._layout, num_blocks, device)
        cache.tensor.normal_()
        decoder = random_decoder(config, "bfloat16", device)
        self.attention = decoder.attention.name
        self._runner = ModelRunner(
            with_graphs(decoder, cache, max_batch),
            *(cache, Sampler(), config.eos_token_ids),
            block_tokens=self._layout.block_tokens,
            device=device,
        )
        self._runner.warm_up()
        self._block_ids = [BlockId(i) for i in range(num_blocks)]
        random.Random(0).shuffle(self._block_ids)  # as in a pool that has lived

    def decode(self, batch: int) -> Measurement:
        sequences = self._sequences(batch, self._context + 1)
        for sequence in sequences:
            sequence.num_computed_tokens = self._context
        times = []
        for _ in range(NUM_WARM_STEPS + NUM_DECODE_STEPS):
            started = time.perf_counter()
            tokens = self._runner.run(Batch(tuple(ScheduledRow(sequence, 1) for sequence in sequences)))
            times.append(time.perf_counter() - started)
            for sequence, token in zip(sequences, tokens, strict=True):
                sequence.num_computed_tokens += 1
                sequence.append(token.token_id)  # type: ignore[union-attr]
        step_s = statistics.median(times[NUM_WARM_STEPS:])
        context = self._context + NUM_WARM_STEPS + NUM_DECODE_STEPS // 2
        return self.decode_measurement("kvrelay", batch, context, step_s)

    def prefill(self, num_tokens: int) -> Measurement:
        (sequence,) = self._sequences(1, num_tokens)
        batch = Batch((ScheduledRow(sequence, num_tokens),))
        return self.prefill_measurement(
            "kvrelay", num_tokens, best_time(self._device, lambda: self._runner.run(batch), num_times=3, calls=1)
        )

    def release(self) -> None:
        """Gives the model's memory back; what is left only computes fractions."""
        del self._runner
        gc.collect()
        if self._device == "cuda":
            torch.cuda.empty_cache()

    def decode_measurement(self, engine: str, batch: int, context: int, step_s: float) -> Measurement:
        weights = sum(num_weights(self.config))
        num_bytes = ITEM_BYTES * weights + batch * context * self._layout.token_bytes
        flops = 2 * weights * batch + batch * self._attention_flops(context)
        return self._measurement(engine, "decode", batch, batch / step_s, step_s, num_bytes, flops)

    def prefill_measurement(self, engine: str, num_tokens: int, step_s: float) -> Measurement:
        of_layers, of_output = num_weights(self.config)
        flops = 2 * of_layers * num_tokens + 2 * of_output  # the last token's logits alone
        flops += num_tokens * self._attention_flops(num_tokens / 2)  # each token sees half of them on average
        num_bytes = ITEM_BYTES * (of_layers + of_output)
        return self._measurement(engine, "prefill", num_tokens, num_tokens / step_s, step_s, num_bytes, flops)

    def _attention_flops(self, context: float) -> float:
        """Of one token that sees `context` others: scores, and the weighted sum."""
        return 4 * self.config.num_layers * self.config.num_heads * self.config.head_dim * context

    def _measurement(
        self, engine: str, kind: str, size: int, tokens_per_s: float, step_s: float, num_bytes: float, flops: float
    ) -> Measurement:
        least_s = max(num_bytes / self._roofline.bytes_per_s, flops / self._roofline.flops_per_s)
        return Measurement(
            engine, kind, size, round(tokens_per_s, 1), round(step_s * 1e3, 3), round(least_s / step_s, 3)
        )

    def _sequences(self, count: int, num_tokens: int) -> list[EngineSequence]:
        draw, blocks = random.Random(count), iter(self._block_ids)
        sampling = SamplingParams(0.0, seed=0, ignore_eos=True)
        num_blocks = self._layout.blocks_for(num_tokens + NUM_WARM_STEPS + NUM_DECODE_STEPS)
        sequences = []
        for index in range(count):
            prompt = tuple(draw.randrange(self.config.vocab_size) for _ in range(num_tokens))
            request = NodeRequest(RequestId(str(index)), prompt, num_tokens, sampling)
            sequence = EngineSequence.create(request, BlockHash(bytes(32)), self._layout.block_tokens)
            sequence.block_table = [next(blocks) for _ in range(num_blocks)]
            sequences.append(sequence)
        return sequences


class TransformersBench:
    """The same model in transformers, its own attention ("sdpa") and cache, no compilation."""

    def __init__(self, config: ModelConfig, device: str) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        llama = LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_model_len,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
        )
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(device):
                self._model = LlamaForCausalLM(llama).eval()
        finally:
            torch.set_default_dtype(torch.float32)
        self._vocab_size = config.vocab_size
        self._device = device

    @torch.inference_mode()
    def decode_step_s(self, batch: int, context: int, num_steps: int) -> float:
        """A step's part of generate: the difference of a long and a short answer."""
        prompt = torch.randint(self._vocab_size, (batch, context), device=self._device)
        self._generate_s(prompt, 1)
        return (self._generate_s(prompt, 1 + num_steps) - self._generate_s(prompt, 1)) / num_steps

    @torch.inference_mode()
    def prefill_s(self, num_tokens: int) -> float:
        prompt = torch.randint(self._vocab_size, (1, num_tokens), device=self._device)
        return best_time(self._device, lambda: self._model(prompt, logits_to_keep=1), num_times=3, calls=1)

    def _generate_s(self, prompt: torch.Tensor, num_tokens: int) -> float:
        synchronize(self._device)
        started = time.perf_counter()
        self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            pad_token_id=0,
        )
        synchronize(self._device)
        return time.perf_counter() - started


def measurements(options: argparse.Namespace, config: ModelConfig, roofline: Roofline) -> Iterator[Measurement]:
    bench = Bench(config, options.device, roofline, options.context, max(options.decode))
    print(f"attention: {bench.attention}", flush=True)
    for batch in options.decode:
        yield bench.decode(batch)
    for num_tokens in options.prefill:
        yield bench.prefill(num_tokens)
    if not options.transformers:
        return
    bench.release()
    other = TransformersBench(config, options.device)
    for batch in options.decode:
        try:
            step_s = other.decode_step_s(batch, options.context, num_steps=16)
        except torch.OutOfMemoryError:
            print(f"{'transformers':<14}{'decode':<9}{batch:>7}  out of memory", flush=True)
        else:
            yield bench.decode_measurement("transformers", batch, options.context + 8, step_s)
    for num_tokens in options.prefill:
        yield bench.prefill_measurement("transformers", num_tokens, other.prefill_s(num_tokens))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="a model of no size, to try the program itself")
    parser.add_argument("--context", type=int, default=1024, metavar="TOKENS", help="before the first decode step")
    parser.add_argument("--decode", type=int, nargs="+", default=DECODE_BATCHES, metavar="SEQUENCES")
    parser.add_argument("--prefill", type=int, nargs="+", default=PREFILL_TOKENS, metavar="TOKENS")
    parser.add_argument("--no-transformers", dest="transformers", action="store_false")
    parser.add_argument("--limit-s", type=float, default=330.0, help="begin no measurement after so long")
    parser.add_argument("--json", type=Path, help="also write the result there")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU; --device cpu --tiny tries the program itself")
    started = time.monotonic()
    roofline = measure_roofline(options.device, 256 if options.tiny else 8192)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}: {roofline.bytes_per_s / 1e9:.0f} GB/s, ", end="")
    print(f"{roofline.flops_per_s / 1e12:.1f} TFLOP/s in bfloat16, measured here", flush=True)
    print(f"{'engine':<14}{'kind':<9}{'size':>7}{'tokens/s':>12}{'step ms':>10}{'of roofline':>13}", flush=True)
    taken: list[Measurement] = []
    complete = True
    for one in measurements(options, TINY if options.tiny else LLAMA_3_1_8B, roofline):
        taken.append(one)
        print(
            f"{one.engine:<14}{one.kind:<9}{one.size:>7}{one.tokens_per_s:>12.1f}{one.step_ms:>10.3f}"
            f"{one.of_roofline:>12.1%}",
            flush=True,
        )
        if time.monotonic() - started > options.limit_s:
            complete = False
            print(f"stopped after {options.limit_s:g} s; what is missing was not measured", flush=True)
            break
    result = {
        "device": name,
        "torch": torch.__version__,
        "roofline": asdict(roofline),
        "measurements": [asdict(one) for one in taken],
        "complete": complete,
    }
    print(json.dumps(result))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
