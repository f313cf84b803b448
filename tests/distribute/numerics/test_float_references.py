"""The float formats give the bytes of the libraries that define them, on a CPU, for every kind of weight."""

import warnings
from types import SimpleNamespace

import pytest
import torch

from distribute.numerics import fp8_block, mx, nvfp4_codec
from tests.distribute.numerics.samples import DTYPES, absmax, raw, weight

EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SHAPES = pytest.mark.parametrize("shape", [(300, 256), (1, 64), (129, 320)], ids=str)


@pytest.fixture(scope="module")
def modelopt() -> SimpleNamespace:
    """What of nvidia-modelopt is compared with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor")
        utils = pytest.importorskip("modelopt.torch.quantization.utils")
    return SimpleNamespace(qtensor=qtensor, utils=utils)


@pytest.fixture(scope="module")
def compressed_tensors() -> SimpleNamespace:
    """What of compressed-tensors is compared with."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    utils = pytest.importorskip("compressed_tensors.quantization.utils")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    return SimpleNamespace(quantization=quantization, utils=utils, compressors=compressors)


def encode(codec, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    values = codec.weight_values(absmax(rows), (rows.shape[0], rows.shape[1]), rows.dtype)
    return codec.encode(rows, values) | {s: t for s, t in values.items() if not s.startswith("#")}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for suffix, tensor in theirs.items():
        assert (ours[suffix].dtype, ours[suffix].shape) == (tensor.dtype, tensor.shape), suffix
        assert torch.equal(raw(ours[suffix]), raw(tensor)), suffix


def finite_in(dtype: torch.dtype, rows: torch.Tensor) -> torch.Tensor:
    """Without what compressed-tensors turns into infinite scales in fp16: it rounds them up beyond the dtype."""
    return rows.clamp(-57000, 57000) if dtype == torch.float16 else rows


def theirs_by_preset(library: SimpleNamespace, preset: str, form: str, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that compressed-tensors stores for a weight; scales from its range, in the weight's dtype."""
    scheme = library.quantization.preset_name_to_scheme(preset, ["Linear"])
    args = scheme.weights
    global_scale = library.utils.generate_gparam(*torch.aminmax(rows)) if preset == "NVFP4" else None
    if args.strategy == "block":
        blocks = library.utils.maybe_pad_tensor_for_block_quant(rows, (128, 128))
        grouped, axes = blocks.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)), (1, 3)
    else:
        grouped, axes = rows.unflatten(1, (-1, args.group_size)), (2,)
    scale, zero = library.utils.calculate_qparams(
        grouped.amin(axes), grouped.amax(axes), args, global_scale=global_scale
    )
    state = {"weight": rows, "weight_scale": scale, "weight_zero_point": zero}
    state |= {} if global_scale is None else {"weight_global_scale": global_scale}
    return library.compressors.BaseCompressor.get_value_from_registry(form).compress(state, scheme)


@EACH_DTYPE
@SHAPES
@pytest.mark.parametrize(
    ("preset", "form", "codec"),
    [
        ("FP8_BLOCK", "float-quantized", fp8_block.CODECS["fp8_block.compressed-tensors.128"]),
        ("MXFP4", "mxfp4-pack-quantized", mx.CODECS["mxfp4.compressed-tensors.32"]),
        ("MXFP8", "mxfp8-quantized", mx.CODECS["mxfp8.compressed-tensors.32"]),
        ("NVFP4", "nvfp4-pack-quantized", nvfp4_codec.CODECS["nvfp4.compressed-tensors.16"]),
    ],
    ids=["fp8_block", "mxfp4", "mxfp8", "nvfp4"],
)
def test_compressed_tensors_stores_the_same(compressed_tensors, preset, form, codec, dtype, shape) -> None:
    rows = finite_in(dtype, weight(dtype, *shape))
    assert_same(encode(codec, rows), theirs_by_preset(compressed_tensors, preset, form, rows))


@EACH_DTYPE
def test_compressed_tensors_global_scales_are_the_same(compressed_tensors, dtype) -> None:
    for value in torch.cat([torch.logspace(-1, 4, 400), torch.tensor([0.0])]).to(dtype):
        theirs = compressed_tensors.utils.generate_gparam(-value, value)
        ours = nvfp4_codec.compressed_tensors_input_values(value.float(), dtype)["input_global_scale"]
        assert torch.equal(ours, theirs), value


@EACH_DTYPE
@SHAPES
def test_modelopt_stores_the_same_mxfp4(modelopt, dtype, shape) -> None:
    rows = weight(dtype, *shape)
    tensor, scales = modelopt.qtensor.MXFP4QTensor.quantize(rows, block_size=32)
    theirs = {"weight": tensor._quantized_data, "weight_scale": scales.reshape(len(rows), -1)}
    assert_same(encode(mx.CODECS["mxfp4.modelopt.32"], rows), theirs)


@EACH_DTYPE
@SHAPES
def test_modelopt_stores_the_same_mxfp8(modelopt, dtype, shape) -> None:
    rows = weight(dtype, *shape)
    tensor, scales = modelopt.qtensor.MXFP8QTensor.quantize(rows)
    assert_same(
        encode(mx.CODECS["mxfp8.modelopt.32"], rows), {"weight": tensor._quantized_data, "weight_scale": scales}
    )


@EACH_DTYPE
@SHAPES
def test_modelopt_stores_the_same_fp8_blocks(modelopt, dtype, shape) -> None:
    rows = weight(dtype, *shape)
    sizes = {-1: 128, -2: 128}
    peaks = modelopt.utils.reduce_block_amax(modelopt.utils.reduce_block_padding(rows, sizes), sizes)
    peaks = torch.where(peaks == 0, 448.0, peaks).clamp(min=torch.finfo(dtype).tiny)  # as `export_amax` guards them
    scale = peaks.float() / 448.0
    tensor, _ = modelopt.qtensor.FP8QTensor.quantize(rows, scale.clone(), block_sizes=sizes)
    theirs = {"weight": tensor._quantized_data, "weight_scale": scale[:, None, :, None]}
    assert_same(encode(fp8_block.CODECS["fp8_block.modelopt.128"], rows), theirs)
