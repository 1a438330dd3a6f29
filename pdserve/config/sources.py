"""Where values come from: command line > PDSERVE_* environment > --config file > torchrun > default, layered by
pydantic-settings.

The command line and the environment are text; text is turned into numbers here, and everything then passes the same
strict checks that values assigned in code pass.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from pdserve.config import environment, flags
from pdserve.config.fields import FIELDS, Settings, flag_name
from pdserve.config.policy_rules import POLICY_FIELDS
from pdserve.faults import ConfigError, Fault

# Fields whose rules judge any value, or only whether there is one: without its wrong half a pair would look like half.
ANY_VALUE_FIELDS = (*POLICY_FIELDS, "host_kv_gb", "kv_dir", "kv_dir_gb")
TRUE, FALSE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}


class FileSource(PydanticBaseSettingsSource):
    """The --config file, whose name comes from a layer above. Keys are the flags' names, with _ or -."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self().get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        name = self.current_state.get("config")
        return read_file(Path(name)) if name else {}


class TorchrunSource(PydanticBaseSettingsSource):
    """What torchrun's environment says of the nodes."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self().get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return dict(environment.torchrun_given())


class LayeredSettings(Settings, BaseSettings):
    """The settings as the layers give them."""

    model_config = SettingsConfigDict(env_prefix=environment.PREFIX, env_ignore_empty=True, extra="forbid", strict=True)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, FileSource(settings_cls), TorchrunSource(settings_cls)

    @field_validator("*", mode="before")
    @classmethod
    def _from_text(cls, value: object, info: ValidationInfo) -> object:
        assert info.field_name is not None
        return from_text(value, flags.kinds(FIELDS[info.field_name].annotation))


class TolerantSettings(LayeredSettings):
    """The same, for a second reading after unknown keys were noted."""

    model_config = SettingsConfigDict(extra="ignore")


def read_layers(given: dict[str, Any]) -> tuple[Settings, list[Fault]]:
    """The settings with `given` (text by field) as the top layer, and what can't be read.

    A field that can't be read has a stand-in in the result, so that the rest can still be judged.
    """
    faults = unknown_variables()
    try:
        return LayeredSettings(**given), faults
    except ValidationError as error:
        found = error.errors()
    faults += [_fault(str(item["loc"][0]), item["input"], item["msg"], item["type"], given) for item in found]
    wrong = {name: item["input"] for item in found if (name := str(item["loc"][0])) in FIELDS}
    settings = TolerantSettings(**(given | {name: _default(name) for name in wrong}))
    return settings.model_copy(update=stand_ins(wrong)), faults


def stand_ins(wrong: dict[str, Any]) -> dict[str, Any]:
    """For fields whose values can't be read: what the rules between fields can judge in their place."""
    return {name: value if name in ANY_VALUE_FIELDS else _default(name) for name, value in wrong.items()}


def _default(name: str) -> Any:
    return "-" if name == "model" else FIELDS[name].default


def _fault(name: str, value: object, message: str, kind: str, given: dict[str, Any]) -> Fault:
    if kind == "missing":
        return Fault(flag_name(name), None, "say what to serve, such as smollm2")
    if name not in FIELDS:
        return Fault(name, value, f"there is no such setting{hint(name, FIELDS)}", "the --config file")
    return Fault(flag_name(name), value, worded(message), _origin(name, given))


def _origin(name: str, given: dict[str, Any]) -> str:
    if name in given:
        return ""
    variable = environment.variable(name)
    if variable in environment.settings_given():
        return variable
    return "torchrun's environment" if name in environment.torchrun_given() else "the --config file"


def worded(message: str) -> str:
    """pydantic's message as the rest of a sentence about the flag."""
    message = message.removeprefix("Value error, ")
    return message.replace("Input should be", "must be").replace("String should have", "must have")


def from_text(value: object, kinds: Sequence[Any]) -> object:
    """Text as the number, truth value or list that a field of these kinds takes; what doesn't fit stays as it is."""
    if flags.LIST in kinds and isinstance(value, str | list):
        words = [value] if isinstance(value, str) else [word for word in value if isinstance(word, str)]
        return tuple(part.strip() for word in words for part in word.split(","))
    if not isinstance(value, str) or str in kinds:
        return value
    if bool in kinds:
        return True if value.lower() in TRUE else False if value.lower() in FALSE else value
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(value)
            except ValueError:
                return value
    return value


def unknown_variables() -> list[Fault]:
    """PDSERVE_* variables that are no setting: a misspelt one must not be ignored."""
    known = {environment.variable(name) for name in FIELDS}
    return [
        Fault(name, value, f"there is no such setting{hint(name, known)}", "the environment")
        for name, value in environment.settings_given().items()
        if name.upper() not in known
    ]


def hint(word: str, known: Iterable[str]) -> str:
    """A question that names the nearest known word, or nothing."""
    meant = flags.nearest(word, known)
    return f"; did you mean {meant}?" if meant else ""


def read_file(path: Path) -> dict[str, Any]:
    """The settings in a YAML or TOML file. Raises ConfigError when it can't be read as a table of settings."""
    try:
        text = path.read_text(encoding="utf-8")
        found = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        reason = f"can't be read ({getattr(error, 'strerror', None) or error}); check the path"
        raise ConfigError([Fault("--config", path, reason)]) from None
    except (yaml.YAMLError, tomllib.TOMLDecodeError) as error:
        raise ConfigError([Fault("--config", path, f"can't be read: {' '.join(str(error).split())}")]) from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError([Fault("--config", path, "must hold lines of `setting: value`")])
    # `null` in YAML is how a person writes "unset".
    return {str(key).replace("-", "_"): value for key, value in found.items() if value is not None}
