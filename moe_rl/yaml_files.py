"""YAML as data: nothing in it is code, nothing in it is lost, and a few lines of it are not millions of values. Every
room may use it; it knows none of them."""

from typing import TYPE_CHECKING, Any

import yaml

LARGEST = 100_000
"""Values in a file, aliases counted each time: a few lines of them can stand for more than any memory holds."""


DEEPEST = 100
"""Levels of nesting. libyaml's reader calls itself for each, and a hundred thousand of them end the process."""


MERGE = "tag:yaml.org,2002:merge"


class YamlError(ValueError):
    """A text that is no YAML, or none that we take; the message says where."""


def parse_yaml(text: str | bytes) -> Any:
    """The value that a text stands for.

    Raises:
        YamlError: not YAML; a mapping with a key twice, of which one would be lost; more than `LARGEST` values; nested
            deeper than `DEEPEST`.
    """
    try:
        text = text.decode() if isinstance(text, bytes) else text
        depth = 0
        for event in yaml.parse(text, _Safe):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise YamlError(f"not valid YAML: nested deeper than {DEEPEST} levels")
        return yaml.load(text, _Loader)
    except YamlError:
        raise
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # bytes, dates and numbers that are none
        raise YamlError(f"not valid YAML: {error}") from error
    except RecursionError as error:
        raise YamlError("not valid YAML: nested too deeply") from error


if TYPE_CHECKING:
    _Safe = yaml.SafeLoader
else:
    _Safe = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is ten times faster


class _Loader(_Safe):
    """The safe loader, which would let the second of two equal keys win: a field would vanish."""

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None and self._expanded(node, {}) > LARGEST:
            raise YamlError(f"more than {LARGEST} values, aliases expanded: no file of ours needs so many")
        return node

    def _expanded(self, node: yaml.Node, known: dict[int, int]) -> int:
        """Scalars below a node, those behind aliases counted each time."""
        if id(node) not in known:
            known[id(node)] = LARGEST + 1  # a node inside itself
            if isinstance(node, yaml.MappingNode):
                self._refuse_twice(node)
            children = node.value if isinstance(node, yaml.CollectionNode) else ()
            parts = [part for child in children for part in (child if isinstance(child, tuple) else (child,))]
            known[id(node)] = 1 + sum(self._expanded(part, known) for part in parts)
        return known[id(node)]

    def _refuse_twice(self, node: yaml.MappingNode) -> None:
        """While `<<` is not merged yet: a key beside an inherited one overrides it, and is no second one."""
        seen = set[Any]()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE:
                continue  # the former are refused when the mapping is made
            name = self.construct_object(key, deep=True)
            if name in seen:
                raise YamlError(f"{key.value!r} is there twice in the mapping of line {node.start_mark.line + 1}")
            seen.add(name)
