"""What other servers' public documents say of each parameter, beside our own table (`antiphon_gateway.parameters`).

OpenAI by its API reference, vLLM by the request records of its server, smg and Dynamo by their API pages. Written by
hand, as read in November 2026; where those pages say nothing, neither does this.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from antiphon_gateway.openapi import OPERATIONS
from antiphon_gateway.parameters import PARAMETERS, Parameter

NOT_STATED = "not stated"
_YES = "honoured"
_NO = "no such parameter"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_OPENAI = _words(
    "model messages prompt n stream stream_options max_tokens max_completion_tokens logprobs top_logprobs temperature"
    " top_p presence_penalty frequency_penalty logit_bias seed stop response_format tools tool_choice"
    " parallel_tool_calls functions function_call reasoning_effort suffix best_of modalities audio verbosity"
    " web_search_options store service_tier prediction user safety_identifier prompt_cache_key prompt_cache_retention"
    " metadata"
)
_OPENAI_COMPLETIONS_ONLY = frozenset({"echo"})
_OPENAI_CHAT_ONLY = frozenset({"response_format", "service_tier", "prompt_cache_key", "prompt_cache_retention"})

_VLLM = _words(
    "model messages prompt n echo stream stream_options max_tokens max_completion_tokens logprobs top_logprobs"
    " temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty logit_bias seed stop"
    " stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens response_format"
    " structured_outputs tools tool_choice parallel_tool_calls include_reasoning reasoning_effort chat_template_kwargs"
    " add_generation_prompt continue_final_message chat_template documents add_special_tokens truncate_prompt_tokens"
    " prompt_embeds mm_processor_kwargs use_beam_search length_penalty allowed_token_ids bad_words logits_processors"
    " vllm_xargs max_repetition_pattern_size min_repetition_pattern_size repetition_min_count prompt_logprobs"
    " spaces_between_special_tokens return_token_ids return_tokens_as_token_ids priority cache_salt kv_transfer_params"
    " request_id"
)
_VLLM_DIFFERS = {
    "user": "ignored",
    "suffix": "refused",
    "priority": "honoured with priority scheduling, else refused",
    "reasoning_effort": "low, medium or high, given to the template",
    "chat_template": "honoured where the server trusts requests with it",
}
_VLLM_IN_OLDER_RELEASES = frozenset({name for name in (row.name for row in PARAMETERS) if name.startswith("guided_")})

_SMG = _words(
    "model messages max_completion_tokens max_tokens temperature top_p n stream stop presence_penalty frequency_penalty"
)
_SMG_DIFFERS = {"n": "1 to 10", "max_tokens": "taken as max_completion_tokens"}

_DYNAMO = _words("model messages prompt stream tools")


def _openai(row: Parameter, endpoint: str) -> str:
    if endpoint == "completions":
        known = row.name in (_OPENAI - _OPENAI_CHAT_ONLY) | _OPENAI_COMPLETIONS_ONLY
    else:
        known = row.name in _OPENAI
    return _YES if known else _NO


def _vllm(row: Parameter) -> str:
    if row.name in _VLLM_DIFFERS:
        return _VLLM_DIFFERS[row.name]
    if row.name in _VLLM_IN_OLDER_RELEASES:
        return "in older releases"
    return _YES if row.name in _VLLM else NOT_STATED


def _smg(row: Parameter, endpoint: str) -> str:
    if endpoint == "completions" or row.name not in _SMG:
        return NOT_STATED
    return _SMG_DIFFERS.get(row.name, _YES)


def _dynamo(row: Parameter) -> str:
    return _YES if row.name in _DYNAMO else NOT_STATED


def _rows(rows: Iterable[Parameter]) -> Iterable[str]:
    for row in rows:
        endpoints = [endpoint.name.lower() for endpoint in row.endpoints]
        ours = f"{row.standing.value}. {row.sentence}"
        if row.harmless:
            ours += f" Accepted as {', '.join(f'`{json.dumps(value)}`' for value in row.harmless)}."
        others = [_openai(row, endpoints[0]), _vllm(row), _smg(row, endpoints[0]), _dynamo(row)]
        yield f"| `{row.name}` | {', '.join(endpoints)} | {ours} | {' | '.join(others)} |"


_NONE = "no such endpoint"
_ENDPOINTS: dict[str, tuple[str, str, str, str]] = {
    "/v1/chat/completions": ("yes", "yes", "yes", "yes"),
    "/v1/completions": ("yes", "yes", NOT_STATED, "yes"),
    "/v1/responses": ("yes", "yes", NOT_STATED, "yes"),
    "/v1/responses/{response_id}": ("yes", NOT_STATED, NOT_STATED, NOT_STATED),
    "/v1/messages": (_NONE, "yes", NOT_STATED, "experimental"),
    "/v1/models": ("yes", "yes", NOT_STATED, "yes"),
    "/v1/models/{model}": ("yes", NOT_STATED, NOT_STATED, NOT_STATED),
    "/tokenize": (_NONE, "yes", NOT_STATED, NOT_STATED),
    "/detokenize": (_NONE, "yes", NOT_STATED, NOT_STATED),
    "/health": (_NONE, "yes", NOT_STATED, NOT_STATED),
    "/metrics": (_NONE, "yes", NOT_STATED, NOT_STATED),
    "/openapi.json": (_NONE, "yes", NOT_STATED, NOT_STATED),
    "/docs": (_NONE, "yes", NOT_STATED, "yes"),
}
"""OpenAI, vLLM, smg, Dynamo."""


def _endpoint_rows() -> Iterable[str]:
    for operation in OPERATIONS:
        own = operation.path.startswith("/v1/antiphon/")
        others = _ENDPOINTS.get(operation.path, (_NONE, *([_NONE if own else NOT_STATED] * 3)))
        here = f"{operation.summary}{', streamed or whole' if operation.streams else ''}."
        yield f"| `{operation.method} {operation.path}` | {here} | {' | '.join(others)} |"


def api_tables() -> str:
    """Endpoints, then parameters."""
    head = ["", "### Endpoints", "", "| endpoint | here | OpenAI | vLLM | smg | Dynamo |", "|---|---|---|---|---|---|"]
    return "\n".join([*head, *_endpoint_rows(), "", "### Parameters"]) + "\n" + parameter_table()


def parameter_table() -> str:
    head = ["", "| parameter | endpoints | here | OpenAI | vLLM | smg | Dynamo |", "|---|---|---|---|---|---|---|"]
    return "\n".join([*head, *_rows(PARAMETERS)]) + "\n\n"
