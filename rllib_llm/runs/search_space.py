"""Search spaces written in YAML: `{grid_search: [...]}`, `{loguniform: [1e-6, 1e-4]}`, ..."""

from __future__ import annotations

from typing import Any

from rllib_llm.shared.errors import UserError

# Name -> argument names of the `ray.tune` function. `choice` and `grid_search` take one list.
SAMPLERS: dict[str, tuple[str, ...]] = {
    "uniform": ("lower", "upper"),
    "quniform": ("lower", "upper", "q"),
    "loguniform": ("lower", "upper"),
    "qloguniform": ("lower", "upper", "q"),
    "randn": ("mean", "sd"),
    "qrandn": ("mean", "sd", "q"),
    "randint": ("lower", "upper"),
    "qrandint": ("lower", "upper", "q"),
    "lograndint": ("lower", "upper"),
    "qlograndint": ("lower", "upper", "q"),
}
LISTS = ("grid_search", "choice")


def to_tune(value: Any, where: str) -> Any:
    """Return `value` with every `{sampler: arguments}` replaced by the `ray.tune` object.

    Arguments are a list in the order of `SAMPLERS`, or a mapping by name. `grid_search` stays the
    mapping that Tune itself understands.

    Raises:
        UserError: wrong arguments for a sampler.
    """
    if isinstance(value, list):
        return [to_tune(item, f"{where}.{index}") for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (name, arguments), *_ = value.items()
        if name in LISTS:
            return _from_list(name, arguments, where)
        if name in SAMPLERS:
            return _from_range(name, arguments, where)
    return {key: to_tune(item, f"{where}.{key}") for key, item in value.items()}


def examples(config: dict[str, Any], limit: int = 64) -> list[dict[str, Any]]:
    """Return concrete configs of the space: every grid point up to `limit`, samplers drawn once."""
    import itertools

    from ray.tune.search.variant_generator import generate_variants

    variants = generate_variants(config, random_state=0)
    return [variant for _, variant in itertools.islice(variants, limit)]


def _from_list(name: str, arguments: Any, where: str) -> Any:
    if not isinstance(arguments, list) or not arguments:
        raise UserError(
            name=f"{where}.{name}",
            value=arguments,
            rule="be a list of at least one value",
            reason="these are tried",
            remedy=f"Write {{{name}: [1, 2]}}",
        )
    if name == "grid_search":
        return {"grid_search": [to_tune(item, where) for item in arguments]}
    from ray import tune

    return tune.choice(arguments)


def _from_range(name: str, arguments: Any, where: str) -> Any:
    from ray import tune

    names = SAMPLERS[name]
    usage = f"Write {{{name}: [{', '.join(names)}]}}."
    if isinstance(arguments, list):
        if len(arguments) != len(names):
            raise UserError(
                name=f"{where}.{name}",
                value=arguments,
                rule=f"have {len(names)} numbers ({', '.join(names)})",
                reason=f"it has {len(arguments)}",
                remedy=usage,
            )
        arguments = dict(zip(names, arguments, strict=True))
    if not isinstance(arguments, dict) or set(arguments) != set(names):
        raise UserError(
            name=f"{where}.{name}",
            value=arguments,
            rule=f"give {', '.join(names)}",
            reason="these are its arguments",
            remedy=usage,
        )
    for key, number in arguments.items():
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise UserError(
                name=f"{where}.{name}.{key}",
                value=number,
                rule="be a number",
                reason="it bounds a range",
                remedy=usage,
            )
    try:
        return getattr(tune, name)(*(arguments[key] for key in names))
    except ValueError as error:
        raise UserError(
            f"{where}.{name}={arguments!r} cannot be sampled: {error}. {usage}"
        ) from error
