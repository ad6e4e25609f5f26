"""The service's methods, each with the operation of HTTP's API that it is the twin of."""

from __future__ import annotations

from antiphon_proto import inference_pb2 as api

from antiphon_gateway.errors import invalid
from antiphon_gateway.grpc_front import from_json
from antiphon_gateway.grpc_front.request import Method
from antiphon_gateway.parameters import Endpoint

SERVICE: str = api.DESCRIPTOR.services_by_name["Inference"].full_name

_MODELS = "/v1/models"


def _path_of_model(request: api.GetModelRequest) -> str:
    if not request.model:
        raise invalid("The parameter model is missing.", param="model", code="missing_parameter")
    return f"{_MODELS}/{request.model}"


METHODS: tuple[Method, ...] = (
    Method("ChatCompletion", api.ChatCompletionRequest, "POST", Endpoint.CHAT.value, from_json.chat),
    Method(
        "StreamChatCompletion",
        api.ChatCompletionRequest,
        "POST",
        Endpoint.CHAT.value,
        from_json.chat_chunk,
        stream=True,
    ),
    Method("Completion", api.CompletionRequest, "POST", Endpoint.COMPLETIONS.value, from_json.completion),
    Method(
        "StreamCompletion",
        api.CompletionRequest,
        "POST",
        Endpoint.COMPLETIONS.value,
        from_json.completion_chunk,
        stream=True,
    ),
    Method("ListModels", api.ListModelsRequest, "GET", _MODELS, from_json.models),
    Method("GetModel", api.GetModelRequest, "GET", _MODELS, from_json.model, path_of=_path_of_model),
    Method("Tokenize", api.TokenizeRequest, "POST", "/tokenize", from_json.tokenized),
    Method("CountTokens", api.TokenizeRequest, "POST", "/tokenize", from_json.counted),
    Method("Detokenize", api.DetokenizeRequest, "POST", "/detokenize", from_json.detokenized),
)
