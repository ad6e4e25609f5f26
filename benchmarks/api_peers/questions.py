"""What `run.py` asks each server: every parameter of our table with a value that asks for something, and odd values.

Plain data, read by programs that run in the peers' own environments too, so it imports nothing.
"""

from __future__ import annotations

from typing import Any

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

_TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
_SAY = [{"role": "user", "content": "hello there"}]

BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": _SAY, "max_tokens": 4},
    COMPLETIONS: {"prompt": "hello there", "max_tokens": 4},
}
"""Without the model's name."""

_BOTH: dict[str, Any] = {
    "n": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.2,
    "logit_bias": {"5": 10},
    "seed": 11,
    "stop": ["xyz"],
    "stop_token_ids": [7],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "min_tokens": 2,
    "skip_special_tokens": False,
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}},
    "structured_outputs": {"regex": "[ab]+"},
    "guided_json": _SCHEMA,
    "guided_regex": "[ab]+",
    "guided_choice": ["yes", "no"],
    "guided_grammar": 'root ::= "a"',
    "guided_decoding_backend": "guidance",
    "guided_whitespace_pattern": "[ ]?",
    "truncate_prompt_tokens": 2,
    "truncation_side": "left",
    "best_of": 2,
    "use_beam_search": True,
    "length_penalty": 0.5,
    "early_stopping": True,
    "allowed_token_ids": [5, 6],
    "bad_words": ["bad"],
    "logits_processors": ["some.code"],
    "vllm_xargs": {"some": "thing"},
    "max_repetition_pattern_size": 4,
    "min_repetition_pattern_size": 2,
    "repetition_min_count": 3,
    "repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 2, "min_count": 3},
    "prompt_logprobs": 1,
    "detokenize": False,
    "spaces_between_special_tokens": False,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "service_tier": "flex",
    "priority": 1,
    "cache_salt": "some salt",
    "kv_transfer_params": {"do_remote_decode": True},
    "user": "somebody",
    "prompt_cache_key": "some key",
    "prompt_cache_retention": "24h",
    "request_id": "some-id",
    "logprob_token_ids": [5, 6],
    "watermarking": True,
    "routed_experts_prompt_start": 1,
    "return_token_offsets": True,
    "return_mm_kwargs": False,
    "ec_transfer_params": {"some": "thing"},
    "stream_interval": 4,
    "session_id": "some-id",
    "thinking_token_budget": 10,
    "return_weight_versions": True,
    "mm_payload": "none",
    "never_heard_of": 1,
}
VALUES: dict[str, dict[str, Any]] = {
    CHAT: {
        **_BOTH,
        "max_completion_tokens": 3,
        "logprobs": True,
        "top_logprobs": 2,
        "tools": [_TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "functions": [_TOOL["function"]],
        "function_call": {"name": "look"},
        "include_reasoning": False,
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": False},
        "add_generation_prompt": False,
        "continue_final_message": True,
        "chat_template": "{{ messages[0].content }}",
        "documents": [{"title": "a", "text": "b"}],
        "echo": True,
        "add_special_tokens": True,
        "mm_processor_kwargs": {"some": "thing"},
        "media_io_kwargs": {"image": {"some": "thing"}},
        "modalities": ["text", "audio"],
        "audio": {"voice": "alloy", "format": "wav"},
        "verbosity": "low",
        "web_search_options": {},
        "store": True,
        "prediction": {"type": "content", "content": "hello"},
        "safety_identifier": "somebody",
        "metadata": {"some": "thing"},
        "moderation": {"some": "thing"},
        "prompt_cache_options": {"mode": "explicit"},
        "return_prompt_text": True,
    },
    COMPLETIONS: {
        **_BOTH,
        "echo": True,
        "logprobs": 2,
        "suffix": "the end",
        "prompt_embeds": "QUFB" * 50,
        "add_special_tokens": False,
    },
}
"""Parameter -> what it is asked with."""

BESIDE: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "tool_choice": {"tools": [_TOOL]},
    "parallel_tool_calls": {"tools": [_TOOL], "tool_choice": "required"},
    "function_call": {"functions": [_TOOL["function"]]},
    "continue_final_message": {
        "messages": [*_SAY, {"role": "assistant", "content": "Well"}],
        "add_generation_prompt": False,
    },
    "return_tokens_as_token_ids": {"logprobs": 1},
    "audio": {"modalities": ["text", "audio"]},
    "length_penalty": {"use_beam_search": True, "n": 2},
    "early_stopping": {"use_beam_search": True, "n": 2},
    "include_stop_str_in_output": {"stop": ["xyz"]},
    "logprob_token_ids": {"logprobs": 1},
    "truncation_side": {"truncate_prompt_tokens": 2},
}
"""What it needs beside it to have a meaning; chat's `logprobs` there is made true."""

ODD: tuple[tuple[str, str, Any], ...] = (
    (CHAT, "n", 17),
    (CHAT, "n", 129),
    (CHAT, "n", 0),
    (CHAT, "temperature", 2.5),
    (CHAT, "temperature", -1),
    (CHAT, "top_p", 0),
    (CHAT, "top_p", 1.5),
    (CHAT, "top_k", -2),
    (CHAT, "min_p", 1.5),
    (CHAT, "presence_penalty", 3),
    (CHAT, "repetition_penalty", 3),
    (CHAT, "repetition_penalty", 0),
    (CHAT, "logit_bias", {"5": 101}),
    (CHAT, "logit_bias", {"99999999": 1}),
    (CHAT, "logit_bias", {"word": 1}),
    (CHAT, "seed", -1),
    (CHAT, "stop", ["a", "b", "c", "d", "e"]),
    (CHAT, "stop", ""),
    (CHAT, "stop", []),
    (CHAT, "top_logprobs", 21),
    (CHAT, "max_tokens", 0),
    (CHAT, "max_tokens", None),
    (CHAT, "max_tokens", "4"),
    (CHAT, "min_tokens", 9),
    (CHAT, "messages", []),
    (CHAT, "stream_options", {"include_usage": True}),
    (CHAT, "tool_choice", "required"),
    (CHAT, "tool_choice", "sometimes"),
    (CHAT, "response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}}),
    (CHAT, "response_format", {"type": "xml"}),
    (CHAT, "reasoning_effort", "heroic"),
    (CHAT, "model", "no-such-model"),
    (COMPLETIONS, "prompt", ""),
    (COMPLETIONS, "prompt", []),
    (COMPLETIONS, "prompt", [1, 2, 3]),
    (COMPLETIONS, "prompt", ["one", "two"]),
    (COMPLETIONS, "prompt", [[1, 2], [3]]),
    (COMPLETIONS, "max_tokens", 0),
    (COMPLETIONS, "logprobs", 6),
    (COMPLETIONS, "logprobs", 21),
    (COMPLETIONS, "best_of", 2),
)
"""Values at the border of the legal: who takes them and who does not. The other fields are those of BODIES alone."""

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}{% if documents %}{{ documents | tojson }}{% endif %}"
    "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
    "{% if reasoning_effort is defined %}{{ reasoning_effort }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Of the model that all are asked about: with a place for whatever can reach a template."""

PATHS: tuple[tuple[str, str], ...] = (
    ("POST", CHAT),
    ("POST", COMPLETIONS),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/responses/{response_id}"),
    ("DELETE", "/v1/responses/{response_id}"),
    ("POST", "/v1/responses/{response_id}/cancel"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/docs"),
)
PATH_BODIES: dict[str, dict[str, Any]] = {
    **BODIES,
    "/v1/messages": {"messages": _SAY, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": _SAY},
    "/v1/responses": {"input": "hello there", "max_output_tokens": 4},
    "/tokenize": {"prompt": "hello there"},
    "/detokenize": {"tokens": [1, 2]},
}


def question(path: str, name: str, value: Any, model: str) -> dict[str, Any]:
    """The body that asks for one thing."""
    beside = dict(BESIDE.get(name, {}))
    if path == CHAT and beside.get("logprobs") == 1:
        beside["logprobs"] = True
    return {"model": model, **BODIES[path], **beside, name: value}


def question_alone(path: str, name: str, value: Any, model: str) -> dict[str, Any]:
    """With nothing beside it."""
    return {"model": model, **BODIES[path], name: value}


def base(path: str, name: str, model: str) -> dict[str, Any]:
    """The same without it: what an answer is compared with."""
    body = question(path, name, None, model)
    if name in BODIES[path]:
        return {**body, name: BODIES[path][name]}
    return {key: value for key, value in body.items() if key != name}
