"""Compiles every Triton kernel for an H200 (compute capability 9.0), which takes no GPU: `python -m` this.

Prints a line for each: its name, and the bytes of shared memory a program takes. In a process of its own, because a
kernel that Triton interprets (TRITON_INTERPRET) cannot be compiled.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvrelay.model import attention_triton, pointwise_triton

H200 = GPUTarget("cuda", 90, 32)
ALIGNED = [["tt.divisibility", 16]]  # as tensors of torch are

ATTENTION = {
    **dict.fromkeys(("tokens_ptr", "context_lens_ptr", "table_ptr"), "*i32"),
    **dict.fromkeys(("parts_ptr", "part_sums_ptr"), "*fp32"),
    **dict.fromkeys(("table_stride", "block_stride", "token_stride"), "i32"),
    "scale": "fp32",
}


def compile_kernel(kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: int) -> None:
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    aligned = {(place,): ALIGNED for place, name in enumerate(kernel.arg_names) if types.get(name, "").startswith("*")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=H200, options=options)
    assert compiled.asm["cubin"]
    print(kernel.__name__, compiled.metadata.shared)  # noqa: T201 - the answer to the test that runs this


def compile_attention(dtype: str, head_dim: int, tile: int, group: int) -> None:
    splits = {"NUM_SPLITS": attention_triton.NUM_SPLITS, "MIN_SPLIT_TOKENS": attention_triton.MIN_SPLIT_TOKENS}
    padded = triton.next_power_of_2(head_dim)
    types = {**dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "o_ptr"), f"*{dtype}"), **ATTENTION}
    compile_kernel(
        attention_triton._attend_part,
        types,
        {"GROUP": group, "PADDED_GROUP": 16, "HEAD_DIM": head_dim, "PADDED_DIM": padded, "BLOCK_TOKENS": 16}
        | {"TILE": tile, **splits},
    )
    compile_kernel(attention_triton._merge_parts, types, {"HEAD_DIM": head_dim, "PADDED_DIM": padded, **splits})


def compile_pointwise(dtype: str, hidden: int, inner: int, num_heads: int, num_kv_heads: int, half: int) -> None:
    model = f"*{dtype}"
    names = [f"{name}_ptr" for name in ("delta", "normal", "qkv", "cos", "sin", "q", "cache", "gate_up", "gated")]
    types = {**dict.fromkeys(names, model), "x_ptr": "*fp32", "weight_ptr": "*fp32", "epsilon": "fp32"}
    types |= {"cache_rows_ptr": "*i64", "layer_rows": "i32"}
    sizes = {"SIZE": hidden, "PADDED_SIZE": triton.next_power_of_2(hidden)}
    compile_kernel(pointwise_triton._add_and_normalize, types, {"ADDS": True, **sizes}, num_warps=8)
    compile_kernel(
        pointwise_triton._add_and_normalize, {**types, "delta_ptr": "*fp32"}, {"ADDS": False, **sizes}, num_warps=8
    )
    compile_kernel(
        pointwise_triton._rotate_and_store,
        types,
        {"NUM_HEADS": num_heads, "NUM_KV_HEADS": num_kv_heads, "BLOCK_TOKENS": 16}
        | {"HALF": half, "PADDED_HALF": triton.next_power_of_2(half)},
        num_warps=1,
    )
    compile_kernel(pointwise_triton._gate, types, {"INNER": inner, "TILE": pointwise_triton.GATE_TILE})


def main() -> None:
    compile_attention("bf16", head_dim=128, tile=64, group=4)  # Llama 3.1 8B
    compile_attention("fp16", head_dim=64, tile=64, group=3)  # SmolLM2 135M
    compile_attention("fp32", head_dim=256, tile=32, group=1)  # the largest tiles
    compile_pointwise("bf16", hidden=4096, inner=14336, num_heads=32, num_kv_heads=8, half=64)
    compile_pointwise("fp32", hidden=576, inner=1536, num_heads=9, num_kv_heads=3, half=32)


if __name__ == "__main__":
    main()
