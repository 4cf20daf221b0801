"""Where in a JSON schema its compiler's complaint comes from, as a JSON pointer.

llguidance says what it refuses and not where. A subschema that is refused alone, with the very same
words, is the place: the search goes down from the root as long as there is one. Definitions of the
root go with every subschema, so that references keep their meaning.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

# Keywords whose value is a schema, a list of schemas, a mapping to schemas. Definitions first: a
# schema that refers to a broken one is refused with the same words.
_DEFINITIONS = ("$defs", "definitions")
_MAPPINGS = (*_DEFINITIONS, "properties", "patternProperties", "dependentSchemas")
_LISTS = ("prefixItems", "items", "anyOf", "allOf", "oneOf")
_SINGLE = ("items", "additionalProperties", "additionalItems", "contains", "propertyNames")
# Seconds of compilations until the place found so far must do. One takes a fraction of a
# millisecond as a rule, and a hostile schema's half a second.
MAX_SEARCH_S = 0.2


def find_place(schema: Any, message: str, refusal: Callable[[Any], str]) -> str:
    """Return a JSON pointer to the smallest part that is refused with `message`.

    Args:
        refusal: says why a schema is refused, "" if it is not.

    Returns:
        "#" for the whole, e.g. "#/properties/a~1b/items".
    """
    root = schema if isinstance(schema, dict) else {}
    shared = {key: root[key] for key in _DEFINITIONS if key in root}
    place, deadline = "#", time.monotonic() + MAX_SEARCH_S
    while True:
        for pointer, part in _parts(schema):
            if time.monotonic() > deadline:
                return place
            if refusal({**shared, **part} if isinstance(part, dict) else part) == message:
                place, schema = f"{place}/{pointer}", part
                break
        else:
            return place


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield the direct subschemas of a schema with their pointers."""
    if not isinstance(schema, dict):
        return
    for key in _MAPPINGS:
        if isinstance(mapping := schema.get(key), dict):
            for name, part in mapping.items():
                yield f"{key}/{name.replace('~', '~0').replace('/', '~1')}", part
    for key in _LISTS:
        if isinstance(parts := schema.get(key), list):
            for index, part in enumerate(parts):
                yield f"{key}/{index}", part
    for key in _SINGLE:
        if isinstance(part := schema.get(key), dict):
            yield key, part
