"""What rules may know of an op, by its name. Ops that are not named here are left alone."""

from __future__ import annotations

from dtorch.runtime.moves import is_local
from dtorch.runtime.plan import Step
from dtorch.runtime.template import dtype_of
from dtorch.transport.messages import Definition, MeshInfo


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ELEMENTWISE = _names("""
add sub subtract rsub mul multiply neg negative maximum minimum fmax fmin atan2 arctan2 hypot copysign logaddexp
exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal abs absolute sign sin cos tan asin acos atan sinh cosh tanh
sigmoid erf erfc floor ceil round trunc frac clamp clamp_min clamp_max lerp addcmul addcdiv where
eq ne lt le gt ge logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not
relu silu gelu relu6 leaky_relu elu softplus mish hardswish hardtanh
__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __neg__
""")
"""Element by element, into new memory, and never fails once shapes are right."""
DIVISIONS = _names("div divide true_divide __truediv__ __rtruediv__")
"""The same, but for integers, which may be divided by zero."""
SAFE = _names("""
matmul mm bmm mv dot inner outer linear addmm baddbmm __matmul__ __rmatmul__
sum mean amax amin prod var std softmax log_softmax layer_norm rms_norm cumsum
cat concat stack pad tril triu flip roll repeat ones zeros full arange empty
scaled_dot_product_attention
""")
"""Into new memory, and never fails once shapes are right."""
VIEWS = _names("""
view reshape flatten unflatten transpose swapaxes permute t movedim squeeze unsqueeze narrow expand chunk split unbind
select __getitem__ detach
""")
"""May share memory with their first input, and never fail once shapes are right."""

INTO = _names("""
add sub mul maximum minimum atan2 hypot copysign exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal neg abs sin
cos tan asin acos atan sinh cosh tanh sigmoid erf erfc floor ceil trunc clamp addcmul addcdiv div silu gelu
""")
"""Ops whose function in torch takes ``out=``, and writes there what it returns otherwise."""

LOCAL = ("local", "view")


def base_name(op: str) -> str:
    """``torch.Tensor.add`` -> ``add``."""
    return op.rpartition(".")[2]


def written(definition: Definition) -> tuple[int, ...]:
    """Inputs that a call writes: in place of a result, or beside its results (``inplace=True``, running statistics)."""
    return (*definition.writes, *definition.params.get("mutates", ()))


def is_pure(step: Step) -> bool:
    """Whether a call may be left out when nobody wants its result: it writes nothing, draws nothing and cannot fail but
    for want of memory."""
    definition = step.definition
    if written(definition) or definition.params.get("random"):
        return False
    if definition.kernel == "redistribute":
        return True
    if is_elementwise(definition):
        return base_name(definition.op) not in DIVISIONS or all(
            dtype_of(layout.dtype).is_floating_point for layout in definition.outputs
        )
    # A number may be an index that is out of range.
    return definition.kernel in LOCAL and not step.numbers and base_name(definition.op) in SAFE | VIEWS


def is_elementwise(definition: Definition) -> bool:
    name = base_name(definition.op)
    return definition.kernel == "local" and not written(definition) and (name in ELEMENTWISE or name in DIVISIONS)


def writes_into(step: Step) -> bool:
    """Whether a call can write its result into an input of the same layout."""
    definition = step.definition
    return (
        len(step.outs) == 1
        and is_elementwise(definition)
        and base_name(definition.op) in INTO
        and set(definition.params) <= {"axes"}
    )


def makes_new_memory(definition: Definition) -> bool:
    """Whether nothing else shares memory with what a call returns, and it keeps none of its inputs."""
    if definition.kernel in ("redistribute", "upload", "upload_shards", "random"):
        return not written(definition)
    return is_elementwise(definition) or (
        definition.kernel == "local" and not definition.writes and base_name(definition.op) in SAFE
    )


def travels(definition: Definition, meshes: dict[int, MeshInfo]) -> bool:
    """Whether a call is a redistribution that takes something from one worker to another."""
    if definition.kernel != "redistribute" or is_local(definition, meshes):
        return False
    return len({w for layout in (*definition.inputs, *definition.outputs) for w in meshes[layout.mesh].workers}) > 1
