"""Self-contained HTML pages from templates of the package. Every subpackage may import this module; it imports none of
them."""

from collections.abc import Callable
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape


def render_page(template: str, /, filters: dict[str, Callable[..., str]] | None = None, **values: Any) -> str:
    """Return the page of a template, given by its path below the package (`drift/drift.html.j2`) and filled in with
    `values`. All values except `Markup` are escaped. Raises UndefinedError for a name that the template uses and
    `values` lacks."""
    environment = Environment(
        loader=PackageLoader("moe_rl", "."),
        autoescape=select_autoescape(default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(filters or {})
    return environment.get_template(template).render(**values)
