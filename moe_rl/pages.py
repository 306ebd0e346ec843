"""Self-contained HTML pages from templates of the package. Every room may use it; it knows none of them."""

from collections.abc import Callable
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape


def render_page(template: str, /, filters: dict[str, Callable[..., str]] | None = None, **values: Any) -> str:
    """A template by its path below the package (`drift/drift.html.j2`), filled in. All values are escaped but `Markup`;
    a name that the template uses and is not given is an error."""
    environment = Environment(
        loader=PackageLoader("moe_rl", "."),
        autoescape=select_autoescape(default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(filters or {})
    return environment.get_template(template).render(**values)
