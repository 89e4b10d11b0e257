"""The plan as plain data: what plan.json holds and ``halftune plan --json`` prints."""

from __future__ import annotations

import dataclasses
from typing import Any

from halftune.plan.tree import Plan


def to_dict(plan: Plan) -> dict[str, Any]:
    """The whole tree in JSON's types: a choice is ``{"value": …, "reason": …}``, dtypes are ``bf16 | fp16 | fp32``."""
    data = _plain(plan)
    data["memory"]["total"] = plan.memory.total
    return data


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value
