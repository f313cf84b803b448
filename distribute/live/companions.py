"""Scales and other tensors that accompany a weight, and where they go when the Hub splits or joins that weight.

Owns nvidia-modelopt's names for them and the rule for their rows. Knows shapes only; never a name of a weight.
"""

from collections.abc import Container, Mapping
from math import prod

from distribute.errors import UserError
from distribute.live.conversion import HubTensor, Part, Shape, flat_rows, row_width, whole

#: Leaves of a quantized module that go where the rows of its weight go.
BY_ROW = ("weight_scale", "weight_scale_2", "weight_scale_inv", "svdquant_lora_b")
#: Leaves that belong to the module's input: each part of a split weight gets all of it.
BY_INPUT = ("input_scale", "pre_quant_scale", "svdquant_lora_a")
#: Leaves that belong to the attention around the module: they are renamed, never split or joined.
BY_NAME = ("k_scale", "v_scale", "k_bias", "v_bias", "output_scale")


def is_companion(key: str) -> bool:
    """Whether a tensor's leaf name is one of these, whatever is beside it."""
    return key.rpartition(".")[2] in (*BY_ROW, *BY_INPUT, *BY_NAME)


def weight_of(key: str, shapes: Container[str]) -> tuple[str, str] | None:
    """The weight that a tensor accompanies, and its leaf: `q_proj.weight_scale`, `experts.down_proj_weight_scale`."""
    for leaf in (*BY_ROW, *BY_INPUT):
        if key.endswith((f".{leaf}", f"_{leaf}")):
            for weight in (f"{key.removesuffix(leaf)}weight", key.removesuffix(f"_{leaf}")):
                if weight in shapes and weight != key:
                    return weight, leaf
    return None


def companion(weight: HubTensor, leaf: str, keys: Mapping[str, str], shapes: Mapping[str, Shape]) -> HubTensor:
    """The companion of a weight on the Hub; `keys` has that of each weight in memory, as far as there are any.

    A companion has one value, or one stretch of values for every row, block of rows or expert of its weight.

    Raises:
        UserError: the weight on the Hub needs a part of what the companion does not divide, or a part that is absent.
    """
    own = weight.name.removesuffix(".weight")
    name = f"{own}.{leaf}" if own != weight.name else f"{own}_{leaf}"
    if absent := [source for source in weight.sources if source not in keys]:
        raise _no_fit(name, weight, f"there is none for {absent[0]}, only for {', '.join(keys)}")
    first = weight.sources[0]
    if weight.parts == (Part(first, 0, flat_rows(shapes[first])),):
        # Unchanged but for the name, so it need not be understood. A matrix may have become a stack of one.
        return whole(name, keys[first], shapes[keys[first]])
    parts: list[Part] = []
    for part in weight.parts:
        key = keys[part.source]
        piece = _piece(part, leaf, key, shapes)
        if piece is None or (len(weight.sources) > 1 and flat_rows(shapes[key]) == 1):
            raise _no_fit(
                name, weight, f"{key} of shape {list(shapes[key])} cannot be divided or joined like its weight"
            )
        if parts[-1:] != [piece]:
            parts.append(piece)
    shape = _shape(weight, leaf, keys[first], parts, shapes)
    if shape is None:
        raise _no_fit(name, weight, f"{keys[first]} of shape {list(shapes[keys[first]])} does not fit its rows")
    return HubTensor(name, shape, tuple(parts))


def _leading(shape: Shape, leaf: str) -> Shape:
    """The dimensions of a weight that its companion may tell apart, outermost first."""
    rows = shape[:-1] or shape
    return rows if leaf in BY_ROW else rows[:-1]  # of stacked experts, each has its own input


def _units(rows: Shape, shape: Shape) -> tuple[int, int] | None:
    """How many equal stretches of rows the companion tells apart, and how many of its dimensions say so."""
    units = 1
    for used, (have, own) in enumerate(zip(rows, shape, strict=False), start=1):
        if not have or not own or (have % own and own % have):
            return None
        units *= min(have, own)
        if have != own:
            return units, used
    return units, min(len(rows), len(shape))


def _piece(part: Part, leaf: str, key: str, shapes: Mapping[str, Shape]) -> Part | None:
    """The flat rows of a companion that belong to some rows of its weight; None: they are not whole."""
    weight, shape = shapes[part.source], shapes[key]
    found = _units(_leading(weight, leaf), shape)
    if found is None:
        return None
    rows, values, width = flat_rows(weight) // found[0], prod(shape) // found[0], row_width(shape)
    first, last = part.start // rows, -(-part.stop // rows)
    cut = part.start % rows or part.stop % rows
    if (cut and last - first > 1) or first * values % width or last * values % width:
        return None
    return Part(key, first * values // width, last * values // width)


def _shape(weight: HubTensor, leaf: str, key: str, parts: list[Part], shapes: Mapping[str, Shape]) -> Shape | None:
    """The shape of joined pieces: as the first companion, less the dimensions that the weight lost."""
    source, shape = shapes[weight.sources[0]], shapes[key]
    _, used = _units(_leading(source, leaf), shape) or (1, 0)
    size = sum(part.stop - part.start for part in parts) * row_width(shape)
    kept, tail = used - (len(source) - len(weight.shape)), shape[used:]
    if kept <= 0:
        made = tail
    else:
        outer = weight.shape[: kept - 1]
        made = (*outer, size // max(1, prod(outer) * prod(tail)), *tail)
    return made if prod(made) == size else None


def _no_fit(name: str, weight: HubTensor, why: str) -> UserError:
    return UserError(
        f"{name} cannot be made: on the Hub, {weight.name} has rows of {', '.join(weight.sources)}, but {why}; "
        "leave these modules out of the quantization"
    )
