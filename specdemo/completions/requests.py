"""Requests of the endpoint, validated; parameters without an implementation are refused unless neutral."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specdemo.core.bounded import ListOf, limited_object
from specdemo.core.errors import UserError
from specdemo.models.tokenizer import ChatMessage

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {  # values without effect of unsupported parameters
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "echo": (False,),
    "suffix": ("",),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
}
_IGNORED = ("user", "metadata", "safety_identifier", "prompt_cache_key", "parallel_tool_calls")  # name the client
_MOST_MESSAGES = 4096
_ROLES = {"developer": "system"}


class InvalidParameter(UserError):
    """Invalid value of a parameter of the request."""

    def __init__(self, sentence: str, parameter: str | None = None) -> None:
        super().__init__(sentence)
        self.parameter = parameter


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class TextPart(_Strict):
    """Part of a message; only texts are supported."""

    type: Literal["text"]
    text: str


class Message(_Strict):
    """Message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | ListOf[TextPart]


class Prediction(_Strict):
    """Predicted output: a text that the answer probably repeats."""

    type: Literal["content"]
    content: str | ListOf[TextPart]


def _joined(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class StreamOptions(_Strict):
    """Options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: bool = False  # this service adds no padding


class CompletionRequest(_Strict, ABC):
    """Parameters of both endpoints; omitted sampling parameters are those of the pair."""

    model: str
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | ListOf[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prediction: Prediction | None = None
    speculation: bool = True  # false: autoregressive decoding
    return_token_ids: bool = False

    @model_validator(mode="after")
    def _options_fit(self) -> CompletionRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: set stream to true")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise ValueError("give either max_tokens or max_completion_tokens")
        if self.prediction is not None and not self.speculation:
            raise ValueError("a prediction needs speculation: omit one of them")
        return self

    @property
    @abstractmethod
    def prompt_input(self) -> str | list[int] | list[ChatMessage]:
        """Return the prompt as `generate` accepts it."""

    @property
    @abstractmethod
    def content(self) -> str:
        """Return the text of the prompt."""

    @property
    def predicted(self) -> str:
        return _joined(self.prediction.content) if self.prediction else ""

    @property
    @abstractmethod
    def alternatives(self) -> int | None:
        """Return the number of alternatives per token in `logprobs`."""

    @property
    def options(self) -> dict[str, Any]:
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        names = ("temperature", "top_p", "top_k", "repetition_penalty", "seed")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        values = {"max_tokens": limit, "stop_texts": stop, **{name: getattr(self, name) for name in names}}
        return {name: value for name, value in values.items() if value is not None}


class ChatRequest(CompletionRequest):
    """Body of /v1/chat/completions."""

    messages: Annotated[ListOf[Message], Field(min_length=1, max_length=_MOST_MESSAGES)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _logprobs_fit(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: set logprobs to true")
        return self

    @property
    def prompt_input(self) -> list[ChatMessage]:
        return [{"role": _ROLES.get(m.role, m.role), "content": _joined(m.content)} for m in self.messages]

    @property
    def content(self) -> str:
        return "".join(f"{m['role']}\n{m['content']}\n" for m in self.prompt_input) + "assistant\n"

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TextRequest(CompletionRequest):
    """Body of /v1/completions."""

    prompt: str | ListOf[str] | ListOf[int]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _single_prompt(self) -> TextRequest:
        if isinstance(self.prompt_input, list) and any(isinstance(part, str) for part in self.prompt_input):
            raise ValueError("prompt must contain a single text: send a request per text")
        return self

    @property
    def prompt_input(self) -> str | list[int]:
        single = isinstance(self.prompt, list) and len(self.prompt) == 1 and isinstance(self.prompt[0], str)
        return cast("str | list[int]", self.prompt[0] if single else self.prompt)

    @property
    def content(self) -> str:
        prompt = self.prompt_input
        return prompt if isinstance(prompt, str) else " ".join(map(str, prompt))

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


RequestT = TypeVar("RequestT", bound=CompletionRequest)


def parse_request(kind: type[RequestT], body: bytes) -> RequestT:
    """Validate a JSON body. Raises `InvalidParameter`."""
    try:
        values = json.loads(body, object_pairs_hook=limited_object)
    except UserError:
        raise
    except (ValueError, RecursionError):
        raise InvalidParameter("the body is not JSON: send a JSON object") from None
    if not isinstance(values, dict):
        raise InvalidParameter("the body must be a JSON object")
    for name, neutral in _NEUTRAL.items():
        value = values.pop(name, None)
        if value is not None and not any(type(value) is type(other) and value == other for other in neutral):
            raise InvalidParameter(f"{name} is not supported: omit it", name)
    known = {name: value for name, value in values.items() if name not in _IGNORED}
    try:
        return kind.model_validate(known)
    except ValidationError as error:
        raise _invalid(error) from None


def _invalid(error: ValidationError) -> InvalidParameter:
    problem = error.errors(include_url=False, include_input=False)[0]
    path = ".".join(map(str, problem["loc"]))[:100]
    if problem["type"] == "extra_forbidden":
        return InvalidParameter(f"{path} is not supported: omit it", path)
    if problem["type"] == "missing":
        return InvalidParameter(f"{path} is missing: add it", path)
    if text := re.match(r"(?:.*\.)?(?:prompt|stop|content)(?=\.|$)", path):
        return InvalidParameter(f"{text[0]} must be a text", text[0])
    if problem["type"] == "value_error":
        return InvalidParameter(problem["msg"].removeprefix("Value error, "))
    return InvalidParameter(f"{path}: {problem['msg'][0].lower()}{problem['msg'][1:200]}", path)
