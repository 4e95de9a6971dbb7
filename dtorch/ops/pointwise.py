"""Elementwise ops."""

from __future__ import annotations

from dtorch.ops._call import Call, Sig, sharded
from dtorch.ops._rules import pointwise
from dtorch.ops.table import row
from dtorch.runtime.layout import PARTIAL_CODES

row("add sub subtract", pointwise("all"), numbers=True)
row("rsub", pointwise("all"), numbers=True)
row("mul multiply", pointwise("each"), numbers=True)


def _division(call: Call) -> list[Sig]:
    linear = "" if call.arg(2, "rounding_mode") else "first"
    return pointwise(linear)(call)


row("div divide true_divide", _division, numbers=True)
row("neg negative positive", pointwise("first"))
row(
    "floor_divide remainder fmod pow float_power atan2 arctan2 maximum minimum fmax fmin hypot copysign nextafter ldexp "
    "logaddexp logaddexp2 xlogy xlog1py zeta heaviside gcd lcm bitwise_and bitwise_or bitwise_xor bitwise_left_shift "
    "bitwise_right_shift logical_and logical_or logical_xor eq ne not_equal lt less le less_equal gt greater ge "
    "greater_equal isclose polar complex __and__ __or__ __xor__ __lshift__ __rshift__ __rpow__ __rdiv__ __rmod__ "
    "__rfloordiv__ __rlshift__ __rrshift__ __rand__ __ror__ __rxor__ __rsub__ __rmul__ __radd__ igamma igammac gammainc "
    "gammaincc chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w "
    "shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v "
    "shifted_chebyshev_polynomial_w hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p",
    pointwise(),
    numbers=True,
)
row(
    "abs absolute acos arccos acosh arccosh asin arcsin asinh arcsinh atan arctan atanh arctanh ceil conj_physical cos cosh "
    "deg2rad digamma erf erfc erfinv exp exp2 expm1 fix floor frac frexp i0 i0e i1 i1e isfinite isinf isnan isneginf "
    "isposinf isreal lgamma log log10 log1p log2 log_ndtr logical_not logit ndtr ndtri nan_to_num rad2deg "
    "reciprocal round rsqrt sgn sigmoid expit sign signbit sin sinc sinh sqrt square tan tanh trunc bitwise_not angle "
    "entr erfcx bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 "
    "modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1 spherical_bessel_j0 airy_ai mvlgamma multigammaln "
    "polygamma gammaln psi",
    pointwise(),
)
row("clamp clip clamp_min clamp_max threshold hardtanh leaky_relu elu celu softplus softshrink hardshrink",
    pointwise(), numbers=True)
row(
    "relu relu6 gelu silu mish hardswish hardsigmoid logsigmoid selu softsign tanhshrink prelu",
    pointwise(),
)
row("lerp addcmul addcdiv where masked_fill", pointwise(), numbers=True)


def _kept(call: Call) -> list[Sig]:
    """Pieces that are pending in any way are copied one by one, or all become zero; a sum may be cast as well."""
    sigs = pointwise("all" if len(call.tensors) > 1 else "first")(call)
    if any(t.dtype != call.outputs[0].dtype for t in call.tensors):
        return sigs
    pending = [sharded(call, (code,) * len(call.tensors), code) for code in PARTIAL_CODES.values()]
    return sigs + [s for s in pending if s not in sigs]


row("clone copy zero", _kept)


def _cast(call: Call) -> list[Sig]:
    """Casting between floating types keeps a pending sum pending (within rounding)."""
    return pointwise("first")(call)


row("to type float double half bfloat16 int long short char byte bool cfloat cdouble", _cast, in_place=False,
    places="torch.Tensor")
row("chalf", pointwise(), in_place=False, places="torch.Tensor")  # torch does not add or divide these
row("zeros_like ones_like empty_like", pointwise(), in_place=False, places="torch")
row("full_like", pointwise(), numbers=frozenset({1, "fill_value"}), in_place=False, places="torch")
row("fill", pointwise(), numbers=frozenset({1, "value"}))
