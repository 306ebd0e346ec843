"""YAML as data: no code is run, no repeated key is accepted, and a few lines cannot stand for millions of values. Every
subpackage may import this module; it imports none of them."""

from typing import TYPE_CHECKING, Any

import yaml

LARGEST = 100_000
"""Most nodes (keys, values, lists and mappings) of a file, those behind aliases counted each time: a few lines of
aliases can stand for more values than any memory holds."""


DEEPEST = 100
"""Most levels of nesting. libyaml's reader calls itself for each level, and a hundred thousand levels end the
process."""


MERGE = "tag:yaml.org,2002:merge"


class YamlError(ValueError):
    """A text that is no YAML, or that `parse_yaml` refuses; the message says where."""


def parse_yaml(text: str | bytes) -> Any:
    """Return the value of a YAML text.

    Raises:
        YamlError: the text is not YAML, has a mapping with a repeated key (one of the values would be lost), has more
            than `LARGEST` nodes, or is nested deeper than `DEEPEST`.
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
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # also of bytes, dates and numbers that are not valid
        raise YamlError(f"not valid YAML: {error}") from error
    except RecursionError as error:
        raise YamlError("not valid YAML: nested too deeply") from error


if TYPE_CHECKING:
    _Safe = yaml.SafeLoader
else:
    _Safe = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is ten times faster


class _Loader(_Safe):
    """The safe loader, without repeated keys (the second would win, and a field would vanish) and with at most
    `LARGEST` nodes."""

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None and self._expanded(node, {}) > LARGEST:
            raise YamlError(f"more than {LARGEST} values, aliases expanded: no file of ours needs so many")
        return node

    def _expanded(self, node: yaml.Node, known: dict[int, int]) -> int:
        """Return the number of nodes from a node downwards, those behind aliases counted each time."""
        if id(node) not in known:
            known[id(node)] = LARGEST + 1  # for a node inside itself
            if isinstance(node, yaml.MappingNode):
                self._refuse_repeated_keys(node)
            children = node.value if isinstance(node, yaml.CollectionNode) else ()
            parts = [part for child in children for part in (child if isinstance(child, tuple) else (child,))]
            known[id(node)] = 1 + sum(self._expanded(part, known) for part in parts)
        return known[id(node)]

    def _refuse_repeated_keys(self, node: yaml.MappingNode) -> None:
        """Raise YamlError if a mapping has a key twice. `<<` must not be merged yet: a key beside an inherited one
        overrides that one, and is no repetition."""
        seen = set[Any]()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE:
                continue  # other keys than scalars are refused when the mapping is made
            name = self.construct_object(key, deep=True)
            if name in seen:
                raise YamlError(f"{key.value!r} is there twice in the mapping of line {node.start_mark.line + 1}")
            seen.add(name)
