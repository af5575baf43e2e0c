"""The ways to make a model smaller, one name each, and what each promises."""

from dataclasses import dataclass

from vivavoce.errors import InputError
from vivavoce.nn.quantised_weight import Activations, Scheme


@dataclass(frozen=True)
class QuantMethod:
    """How matrices are kept and inputs met. `error` bounds a layer's relative error on normal inputs."""

    name: str
    scheme: Scheme
    error: float
    what: str
    activations: Activations = "float"
    calibrates: bool = False
    trains: bool = False


METHODS = {
    method.name: method
    for method in (
        QuantMethod("fp16", "float16", 0.001, "16-bit floats; half the size, no loss that can be heard"),
        QuantMethod("bf16", "bfloat16", 0.008, "16-bit floats of float32's range; faster than fp16 on CPUs with AMX"),
        QuantMethod("int8-dynamic", "int8", 0.03, "int8 products, inputs rounded as they come", "dynamic"),
        QuantMethod("int8-static", "int8", 0.06, "int8 products, the inputs' range from calibration", "static", True),
        QuantMethod("int8-weight", "int8", 0.02, "int8 weights, float inputs"),
        QuantMethod("int4-weight", "int4", 0.15, "int4 weights in groups of columns, float inputs"),
        QuantMethod("fp8", "float8", 0.05, "8-bit floats (e4m3) with a scale a row, float inputs"),
        QuantMethod(
            "qat",
            "int4",
            0.15,
            "int4 weights after fine-tuning with rounding in the loop",
            calibrates=True,
            trains=True,
        ),
    )
}
LOSSLESS = {
    "sdpa": "every model here attends by scaled_dot_product_attention already; there is nothing to convert",
    "compile": "it changes no file: weights stay as they are, and captured graphs do for decoding what it would",
}


def method_of(name: str) -> QuantMethod:
    """The method of this name."""
    if name in LOSSLESS:
        raise InputError(f"{name!r} makes no smaller model: {LOSSLESS[name]}")
    if name not in METHODS:
        raise InputError(f"there is no method {name!r}; use one of {', '.join(METHODS)}")
    return METHODS[name]
