"""Requests of the endpoint, validated; parameters without an implementation are refused unless neutral."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from specdemo.completions.fields import InvalidParameter, fields_with_effect, parameter_error, rename_synonyms
from specdemo.core.errors import ListOf, UserError, limited_object
from specdemo.core.sampling import SAMPLING_NUMBERS
from specdemo.models.tokenizer import ChatMessage

_MOST_MESSAGES, _MOST_PROMPTS = 4096, 2048
_ROLES = {"developer": "system"}
_TEXT_PARTS = ("text", "input_text", "output_text")


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


def _text_of_part(part: Any, name: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind not in _TEXT_PARTS:
        raise parameter_error(name, f"is of type {kind[:40]!r}, and this service reads texts: remove it")
    if (
        kind is None
        or fields_with_effect(part, "parts").keys() != {"type", "text"}
        or not isinstance(part["text"], str)
    ):
        raise ValueError("a part must be a text")
    return part["text"]


def _joined(content: Any) -> Any:
    """Return the text of a list of parts."""
    if not isinstance(content, list):
        return content
    return "".join(_text_of_part(part, str(i)) for i, part in enumerate(content))


_Content = Annotated[str, BeforeValidator(_joined)]


class Message(_Strict):
    """Message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: _Content

    @model_validator(mode="before")
    @classmethod
    def _effective(cls, message: Any) -> Any:
        if not isinstance(message, dict):
            return message
        if message.get("role") == "assistant":  # its content is absent beside calls of tools
            message = {"content": "", **message}
        return fields_with_effect(message, "messages")


class Prediction(_Strict):
    """Predicted output: a text that the answer probably repeats."""

    type: Literal["content"]
    content: _Content


class StreamOptions(_Strict):
    """Options of a streamed answer."""

    include_usage: bool = False
    speculation: bool = False  # outcome of each token, and the ledger
    include_obfuscation: bool = False  # this service adds no padding
    continuous_usage_stats: Literal[False] = False


class CompletionRequest(_Strict, ABC):
    """Parameters of both endpoints; omitted sampling parameters are those of the pair."""

    model: str
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | ListOf[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions = StreamOptions()
    prediction: Prediction | None = None
    speculation: bool = True  # false: autoregressive decoding
    return_token_ids: bool = False
    truncation_length: Annotated[int, Field(ge=1)] | None = None  # prompts are not truncated, but refused

    _route: ClassVar[str]

    @model_validator(mode="before")
    @classmethod
    def _effective(cls, values: Any) -> Any:
        return fields_with_effect(rename_synonyms(values), "bodies", "supported", cls._route)

    @model_validator(mode="after")
    def _options_fit(self) -> CompletionRequest:
        if "stream_options" in self.model_fields_set and not self.stream:
            raise ValueError("stream_options needs stream: set stream to true")
        if self.prediction is not None and not self.speculation:
            raise ValueError("a prediction needs speculation: omit one of them")
        return self

    @property
    @abstractmethod
    def prompt_input(self) -> str | list[int] | list[ChatMessage]:
        """Return the prompt as `generate` accepts it."""

    @property
    def requests(self) -> Sequence[CompletionRequest]:
        """Return a request per prompt."""
        return (self,)

    @property
    @abstractmethod
    def content(self) -> str:
        """Return the text of the prompt."""

    @property
    def predicted(self) -> str:
        return self.prediction.content if self.prediction else ""

    @property
    @abstractmethod
    def alternatives(self) -> int | None:
        """Return the number of alternatives per token in `logprobs`."""

    @property
    def echoed(self) -> bool:
        """Return True if the answer begins with the prompt."""
        return False

    @property
    def scores_only(self) -> bool:
        """Return True if no token is generated."""
        return self.echoed and self.max_tokens == 0

    @property
    def template_options(self) -> Mapping[str, Any]:
        return {}

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of the recipe that the request names."""
        values = self.model_dump(include={*SAMPLING_NUMBERS, "max_tokens", "seed"}, exclude_none=True)
        if self.top_k == -1:
            values["top_k"] = 0
        if self.seed is not None and 1 << 63 <= self.seed < 1 << 64:
            values["seed"] = self.seed - (1 << 64)  # recipes have signed seeds
        if self.stop:
            values["stop_texts"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        return values


class ChatRequest(CompletionRequest):
    """Body of /v1/chat/completions."""

    _route = "/v1/chat/completions"

    messages: Annotated[ListOf[Message], Field(min_length=1, max_length=_MOST_MESSAGES)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None  # default: if the assistant wrote it
    _continued: bool = False  # the answer continues the last message

    @model_validator(mode="after")
    def _parameters_fit(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: set logprobs to true")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("a message to continue has no generation prompt: omit add_generation_prompt")
        for name in self.chat_template_kwargs:
            if not name.isidentifier() or name == "messages":
                raise ValueError(f"chat_template_kwargs cannot set {name[:40]!r}: choose a variable of the template")
        self._continued = bool(self.continue_final_message)
        if self.continue_final_message is None and self.add_generation_prompt is None:
            self._continued = self.messages[-1].role == "assistant"
        if self._continued and len(self.messages) > 1 and not self.messages[-1].content:
            self.messages.pop()  # an answer that has not begun
            self._continued = False
        return self

    @property
    def prompt_input(self) -> list[ChatMessage]:
        return [{"role": _ROLES.get(m.role, m.role), "content": m.content} for m in self.messages]

    @property
    def content(self) -> str:
        text = "".join(f"{m['role']}\n{m['content']}\n" for m in self.prompt_input)
        return text[:-1] if self._continued else f"{text}assistant\n"

    @property
    def template_options(self) -> Mapping[str, Any]:
        if self._continued:
            return {**self.chat_template_kwargs, "continue_final_message": True}
        ending = {"add_generation_prompt": False} if self.add_generation_prompt is False else {}
        return {**self.chat_template_kwargs, **ending}

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TextRequest(CompletionRequest):
    """Body of /v1/completions."""

    _route = "/v1/completions"

    prompt: str | ListOf[str] | ListOf[int] | ListOf[ListOf[int]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False

    @model_validator(mode="after")
    def _prompts_fit(self) -> TextRequest:
        if len(self.requests) > _MOST_PROMPTS:
            raise ValueError(f"prompt has more than {_MOST_PROMPTS:,} texts: send several requests")
        if len(self.requests) > 1 and self.stream:
            raise ValueError("answers to several prompts are not streamed: omit stream, or send a request per text")
        return self

    @property
    def requests(self) -> Sequence[TextRequest]:
        """Return a request per prompt."""
        if not isinstance(self.prompt, list) or not self.prompt or isinstance(self.prompt[0], int):
            return (self,)
        return [self.model_copy(update={"prompt": prompt}) for prompt in self.prompt]

    @property
    def prompt_input(self) -> str | list[int]:
        return cast("str | list[int]", self.prompt)

    @property
    def content(self) -> str:
        prompt = self.prompt_input
        return prompt if isinstance(prompt, str) else " ".join(map(str, prompt))

    @property
    def echoed(self) -> bool:
        return self.echo

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


RequestT = TypeVar("RequestT", bound=CompletionRequest)


def parse_request(kind: type[RequestT], body: bytes) -> RequestT:
    """Validate a JSON body. Raises `InvalidParameter`."""
    try:
        values = json.loads(body, object_pairs_hook=_known_keys)
    except UserError:
        raise
    except (ValueError, RecursionError):
        raise InvalidParameter("the body is not JSON: send a JSON object") from None
    if not isinstance(values, dict):
        raise InvalidParameter("the body must be a JSON object")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _invalid(error) from None


def _known_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Read an object without keys of null."""
    return {name: value for name, value in limited_object(pairs).items() if value is not None}


def _invalid(error: ValidationError) -> InvalidParameter:
    problem = error.errors(include_url=False, include_input=False)[0]
    path = ".".join(map(str, problem["loc"]))[:100]
    if problem["type"] == "parameter":
        path = ".".join(filter(None, (path, problem["ctx"]["name"])))
        return InvalidParameter(f"{path} {problem['msg']}", path)
    if problem["type"] == "extra_forbidden":
        return InvalidParameter(f"{path} is not supported: omit it", path)
    if problem["type"] == "missing":
        return InvalidParameter(f"{path} is missing: add it", path)
    if problem["type"] == "literal_error" and path.endswith("role"):
        return InvalidParameter(f"{path} must be {problem['ctx']['expected']}: tools are not supported", path)
    if text := re.match(r"(?:.*\.)?(?:prompt|stop|content)(?=\.|$)", path):
        return InvalidParameter(f"{text[0]} must be a text", text[0])
    if problem["type"] == "value_error":
        return InvalidParameter(problem["msg"].removeprefix("Value error, "))
    return InvalidParameter(f"{path}: {problem['msg'][0].lower()}{problem['msg'][1:200]}", path)
