"""The arguments of a product with a quantised weight, and what every form checks of them."""

from jaxtyping import Array, Float, Int4, Int8

Rows = Float[Array, "n i"]
Numbers = Int8[Array, "o i"] | Int4[Array, "o i"]
Scale = Float[Array, "o g"]
Offset = Float[Array, "o g"]
Product = Float[Array, "n o"]


def group_of(values: Numbers, scale: Scale) -> int:
    """Inputs that share a scale. Raises ValueError where the groups do not divide the inputs."""
    inputs, groups = values.shape[1], scale.shape[1]
    if inputs % groups:
        raise ValueError(f"{groups} groups over {inputs} inputs; expected a number that divides them")
    return inputs // groups
