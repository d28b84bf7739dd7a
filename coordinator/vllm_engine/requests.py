"""Requests of vLLM's gRPC protocol as kvrelay's own, and what of them is not served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvrelay.errors import InvalidRequestError
from kvrelay.inference import GenerateRequest, Prompt, TextPrompt, TokenPrompt
from kvrelay.sampling import SamplingParams
from kvrelay.structured import StructuredOutput, StructureKind

# What the protocol has no field for; each may be absent.
MODEL_KEY = "x-kvrelay-model"
PRIORITY_KEY = "x-kvrelay-priority"
CACHE_SALT_KEY = "x-kvrelay-cache-salt"

_NOT_SERVED = {
    "kv_transfer_params": "the cluster moves KV by itself",
    "kv_transfer_params_json": "the cluster moves KV by itself",
    "mm_inputs": "only text models are served",
    "extra_mm_inputs": "only text models are served",
    "media_refs": "only text models are served",
}
_SAMPLING_NOT_SERVED = {
    "prompt_logprobs": "log-probabilities of a prompt are not computed",
    "truncate_prompt_tokens": "a prompt is never cut; send the tokens that it should have",
    "structural_tag": "use json_schema, regex, choice or grammar",
}


def request_from_pb(wire: Any, metadata: Mapping[str, str]) -> GenerateRequest:
    """Of a vllm.grpc.engine.GenerateRequest and the call's metadata. Raises InvalidRequestError, naming the field, for
    what is not served."""
    _refuse(wire, _NOT_SERVED, "")
    if wire.data_parallel_rank:
        raise InvalidRequestError(
            f"data_parallel_rank is {wire.data_parallel_rank}; a cluster is one rank, so leave it out"
        )
    return GenerateRequest(
        prompt=_prompt(wire),
        sampling=_sampling(wire.sampling_params),
        request_id=wire.request_id,
        model=metadata.get(MODEL_KEY, ""),
        n=wire.sampling_params.n or 1,
        cache_salt=metadata.get(CACHE_SALT_KEY),
        priority=_priority(metadata.get(PRIORITY_KEY)),
    )


def _refuse(wire: Any, reasons: Mapping[str, str], where: str) -> None:
    for field, _ in wire.ListFields():
        if field.name in reasons:
            raise InvalidRequestError(f"{where}{field.name} is set and not served: {reasons[field.name]}")


def _prompt(wire: Any) -> Prompt | None:
    match wire.WhichOneof("input"):
        case "tokenized":
            return TokenPrompt(tuple(wire.tokenized.input_ids))
        case "text":
            return TextPrompt(wire.text)
        case _:
            return None


def _sampling(wire: Any) -> SamplingParams:
    """In a field without presence 0 says that the client left it out, as vLLM itself takes it. What only shapes text
    (`skip_special_tokens`, `spaces_between_special_tokens`, `include_stop_str_in_output`) changes nothing: token ids
    are what is answered."""
    _refuse(wire, _SAMPLING_NOT_SERVED, "sampling_params.")
    return SamplingParams(
        temperature=wire.temperature if wire.HasField("temperature") else 1.0,
        top_p=wire.top_p or 1.0,
        top_k=wire.top_k,
        min_p=wire.min_p,
        frequency_penalty=wire.frequency_penalty,
        presence_penalty=wire.presence_penalty,
        repetition_penalty=wire.repetition_penalty or 1.0,
        max_tokens=wire.max_tokens if wire.HasField("max_tokens") else None,
        min_tokens=wire.min_tokens,
        stop=tuple(wire.stop),
        stop_token_ids=tuple(wire.stop_token_ids),
        ignore_eos=wire.ignore_eos,
        logprobs=wire.logprobs if wire.HasField("logprobs") else None,
        seed=wire.seed if wire.HasField("seed") else None,
        logit_bias=dict(wire.logit_bias),
        structured=_structured(wire),
    )


def _structured(wire: Any) -> StructuredOutput | None:
    match wire.WhichOneof("constraint"):
        case None:
            return None
        case "json_object":
            return StructuredOutput(StructureKind.JSON_OBJECT) if wire.json_object else None
        case "choice":
            return StructuredOutput(StructureKind.CHOICE, choices=tuple(wire.choice.choices))
        case kind:
            return StructuredOutput(StructureKind(kind), text=getattr(wire, kind))


def _priority(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return int(text)
    except ValueError as error:
        raise InvalidRequestError(f"{PRIORITY_KEY} is {text[:64]!r}; allowed is a whole number") from error
