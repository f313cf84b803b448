"""Inputs of a linear layer as an engine codes them: to be measured here, never stored.

The formats are those of weights, so their codecs do the work: one scale for all rows, one for each, or one for
each group within a row.
"""

import torch
from torch import Tensor
from torch.nn import functional

from distribute.numerics.table import find_codec


def coded_inputs(x: Tensor, absmax: Tensor, *, form: str, granularity: str, group_size: int, dialect: str) -> Tensor:
    """fp32 [..., in]: finite inputs [..., in] in the model's dtype, coded and decoded again.

    Args:
        absmax: fp32 0-dim, of all inputs that calibration saw: the range of a scale that is stored.
        form, granularity, group_size: of the quantizer of the inputs ("tensor", "token" or "group").
        dialect: whose rule makes the scales.
    """
    rows = x.reshape(-1, x.shape[-1])
    if granularity == "token":
        decoded = _coded(f"{form}.{dialect}.channel", rows, absmax)
    elif granularity == "group" and form == "fp8":
        padding = -rows.shape[1] % group_size
        groups = functional.pad(rows, (0, padding)).reshape(-1, group_size)
        decoded = _coded(f"fp8.{dialect}.channel", groups, absmax).reshape(len(rows), -1)[:, : rows.shape[1]]
    elif granularity == "group":
        decoded = _coded(f"{form}.{dialect}.{group_size}", rows, absmax)
    elif form == "fp8":
        decoded = _coded(f"fp8.{dialect}.tensor", rows, absmax)
    else:
        # No weight has one integer scale: all inputs as one row, which the largest input ends.
        whole = torch.cat((rows.reshape(-1), absmax.to(rows).reshape(1)))[None]
        decoded = _coded(f"{form}.{dialect}.channel", whole, absmax)[0, :-1]
    return decoded.reshape(x.shape)


def _coded(key: str, rows: Tensor, absmax: Tensor) -> Tensor:
    codec = find_codec(key)
    values = codec.weight_values(absmax, (rows.shape[0], rows.shape[1]), rows.dtype)
    values = {name: value.to(rows.device) for name, value in values.items()}
    return codec.decode({**values, **codec.encode(rows, values)}, rows.shape[1])
