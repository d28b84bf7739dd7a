"""Whether two requests are the same one, sent twice. Pure."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import replace

from kvrelay.inference import GenerateRequest, TokenPrompt
from kvrelay.sampling import SamplingParams


def request_digest(request: GenerateRequest, tenant: str) -> bytes:
    """32 bytes of all that the answer and its account depend on; not of the id, nor of how long it is kept."""
    rest = replace(request, request_id="", keep_s=0.0, sampling=_in_order(request.sampling))
    digest = hashlib.sha256()
    if isinstance(request.prompt, TokenPrompt):  # long ones are common, and slow to write out
        rest = replace(rest, prompt=TokenPrompt(()))
        digest.update(array("q", request.prompt.token_ids).tobytes())
    digest.update(repr((tenant, rest)).encode())
    return digest.digest()


def digests_of(request: GenerateRequest, settled: SamplingParams, tenant: str) -> frozenset[bytes]:
    """Of the request as it was sent, and with the seed and length that were settled for it: what a client sends that
    begins anew elsewhere."""
    sampling = replace(request.sampling, seed=settled.seed, max_tokens=settled.max_tokens)
    return frozenset((request_digest(request, tenant), request_digest(replace(request, sampling=sampling), tenant)))


def _in_order(sampling: SamplingParams) -> SamplingParams:
    return replace(sampling, logit_bias=dict(sorted(sampling.logit_bias.items())))
