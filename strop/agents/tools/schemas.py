"""Schemas and calls in the function form of OpenAI.

Each class has `model_validate` (from a mapping) and `model_dump` (back to one). Keys that a class does not name
are kept, so nested objects, arrays and their items survive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self, get_type_hints

from strop.utils.sanitize import read_json


class _Schema:
    """Conversion from and to mappings, for the dataclasses below."""

    @classmethod
    def model_validate(cls, value: object) -> Self:
        """The schema of a mapping.

        Raises:
            ValueError: a required key is missing, or a value is no object where there must be one.
        """
        if isinstance(value, cls):
            return value
        value = schema_mapping(value)
        names = {f.name for f in fields(cls)} - {"extra"}  # type: ignore[arg-type]  # every subclass is a dataclass
        values = {key: cls._read(key, item) for key, item in value.items() if key in names}
        extra = {key: item for key, item in value.items() if key not in names}
        try:
            return cls(**values, **({"extra": extra} if extra else {}))
        except TypeError as error:
            raise ValueError(f"{cls.__name__} {dict(value)!r:.120} is incomplete: {error}") from error

    @classmethod
    def _read(cls, key: str, item: object) -> Any:
        hint = get_type_hints(cls).get(key)
        if isinstance(hint, type) and issubclass(hint, _Schema):
            return hint.model_validate(item)
        if key == "properties" and isinstance(item, Mapping):
            return {
                name: OpenAIFunctionPropertySchema.model_validate(schema) for name, schema in item.items()
            }
        return item

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """As a mapping, without values that are None; options of other libraries are accepted and change nothing."""
        dumped = {
            f.name: _dump(getattr(self, f.name))
            for f in fields(self)  # type: ignore[arg-type]  # every subclass is a dataclass
            if f.name != "extra" and getattr(self, f.name) is not None
        }
        return {**dumped, **getattr(self, "extra", {})}


def schema_mapping(value: Any) -> Mapping[str, Any]:
    """A schema as a mapping, also one that is an object with `model_dump`, of these classes or of pydantic.

    Raises:
        ValueError: it is neither.
    """
    if not isinstance(value, Mapping) and callable(getattr(value, "model_dump", None)):
        value = value.model_dump(exclude_unset=True)
    if not isinstance(value, Mapping):
        raise ValueError(f"a tool schema must be an object, but is {value!r:.80}")
    return value


def _dump(value: object) -> Any:
    if isinstance(value, _Schema):
        return value.model_dump()
    if isinstance(value, Mapping):
        return {key: _dump(item) for key, item in value.items()}
    return value


@dataclass(frozen=True)
class OpenAIFunctionPropertySchema(_Schema):
    """One parameter."""

    type: Any = None
    """JSON-schema type, or a list of types."""
    description: str | None = None
    enum: list[Any] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """All other keys: items, properties, anyOf, default and so on."""


@dataclass(frozen=True)
class OpenAIFunctionParametersSchema(_Schema):
    """All parameters."""

    type: str = "object"
    properties: Mapping[str, OpenAIFunctionPropertySchema] = field(default_factory=dict)
    required: list[str] = field(default_factory=list)
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OpenAIFunctionSchema(_Schema):
    """A function."""

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = field(default_factory=OpenAIFunctionParametersSchema)
    strict: bool | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OpenAIFunctionToolSchema(_Schema):
    """A tool, as the prompt shows it."""

    type: str
    function: OpenAIFunctionSchema
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the function."""
        return self.function.name


@dataclass(frozen=True)
class OpenAIFunctionParsedSchema(_Schema):
    """A call as a model wrote it."""

    name: str
    arguments: str
    """JSON text."""


@dataclass(frozen=True)
class OpenAIFunctionCallSchema(_Schema):
    """A call with its arguments read."""

    name: str
    arguments: dict[str, Any]

    @staticmethod
    def from_openai_function_parsed_schema(
        parsed: OpenAIFunctionParsedSchema,
    ) -> tuple[OpenAIFunctionCallSchema, bool]:
        """The call, and True where its arguments could not be read (they are empty then)."""
        try:
            arguments = read_json(parsed.arguments)
        except (ValueError, TypeError):
            arguments = None
        is_read = isinstance(arguments, dict)
        return OpenAIFunctionCallSchema(parsed.name, arguments if is_read else {}), not is_read


@dataclass(frozen=True)
class OpenAIFunctionToolCall(_Schema):
    """A call in a message."""

    id: str
    function: OpenAIFunctionCallSchema
    type: str = "function"
