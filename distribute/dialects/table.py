"""Every dialect by name. A new one is a module in this package and a line here. Torch-free."""

from distribute.dialects import compressed_tensors, modelopt
from distribute.dialects.spec import Dialect

DIALECTS: dict[str, Dialect] = {
    "modelopt": modelopt,
    "compressed-tensors": compressed_tensors,
}
