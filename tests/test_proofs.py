"""The checker of rules itself: it catches what is false, finds what is missing, and believes what is right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dtorch.cli import main
from dtorch.ops import table
from dtorch.ops._call import Call, R, Sig
from dtorch.ops._op import Op
from dtorch.ops._rules import P_MAX, P, pointwise, reduction
from dtorch.proofs.bench import Bench, Mismatch
from dtorch.proofs.cases import Case, case_of
from dtorch.proofs.claims import line, prove
from dtorch.proofs.listing import missing_signatures
from dtorch.proofs.search import search
from dtorch.runtime.layout import PARTIAL_CODES, shard_code

Rule = Callable[[Call], "list[Sig]"]


def case(name: str, rule: Rule, *tensors: torch.Tensor, **kwargs: object) -> Case:
    """A call of a function of torch under a rule that need not be its own."""
    op = Op(name, table.resolve(name), rule)
    return case_of(op, tensors, kwargs)


X = torch.tensor([[1.5, -2.0, 0.5], [0.0, 3.0, -1.0], [2.0, -4.0, 1.0], [-0.5, 2.5, 3.5], [1.0, 1.0, -3.0]])


def only(*sigs: Sig) -> Rule:
    return lambda call: list(sigs)


FALSE = {
    "the shard of another dim": case("torch.exp", only(Sig((0,), (1,))), X),
    "a sum that is not linear": case("torch.exp", only(Sig((P,), (P,))), X),
    "a sum that is linear only where signs agree": case("torch.abs", only(Sig((P,), (P,))), X),
    "a mean without weights": case("torch.mean", only(Sig((0,), (PARTIAL_CODES["avg"],))), X),
    "a maximum of minima": case("torch.amin", only(Sig((0,), (P_MAX,))), X, dim=(0,)),
    "a cut through what softmax adds up": case("torch.softmax", only(Sig((1,), (1,))), X, dim=1),
    "replicas that differ": case("torch.cumsum", only(Sig((0,), (R,))), X, dim=1),
    "a shift of both summands": case("torch.add", only(Sig((P, R), (P,))), X, X),
    "argmax of pieces": case("torch.argmax", only(Sig((0,), (0,))), X.flatten()),
    "ties by position": case("torch.argsort", only(Sig((0,), (0,))), X, dim=0),
    "a product cut along one factor": case("torch.mm", only(Sig((1, R), (P,))), X, X.T.contiguous()),
}


@pytest.mark.parametrize("what", FALSE)
def test_a_false_claim_is_caught(what: str) -> None:
    verdict = prove(FALSE[what])
    assert verdict.false
    assert FALSE[what].op.name in verdict.false[0]


def test_a_false_claim_that_holds_without_empty_pieces_is_caught() -> None:
    # An unsigned minimum over nothing: two devices have no empty piece here, four have.
    lonely = case("torch.amax", only(Sig((0,), (P_MAX,))), X, dim=(0,))
    assert prove(lonely, meshes=(2,)).false == []
    assert "4 devices" in prove(lonely, meshes=(2, 4)).false[0]


def test_a_false_claim_about_blocks_is_caught() -> None:
    class Halves:
        """Right for plain shards, wrong for shards in blocks: says the result is cut plainly."""

        def __call__(self, call: Call) -> list[Sig]:
            code = call.tensors[0].codes[0]
            return [Sig((0,), (0,))] if code < 64 else [Sig((code,), (shard_code(0, 1),))]

    false = prove(case("torch.neg", Halves(), X)).false
    assert len(false) == 1
    assert "in blocks of" in false[0]


@pytest.mark.parametrize(
    ("name", "rule", "kwargs"),
    [("torch.sin", pointwise(), {}), ("torch.neg", pointwise("first"), {}), ("torch.sum", reduction("sum", linear=True), {})],
)
def test_a_true_rule_is_believed_and_lacks_nothing(name: str, rule: Rule, kwargs: dict[str, object]) -> None:
    made = case(name, rule, X, **kwargs)
    verdict = prove(made)
    assert verdict.false == []
    assert verdict.right > 0
    assert search(made) == []


def test_what_a_rule_does_not_offer_is_found() -> None:
    bare = {line(sig) for sig in search(case("torch.mm", only(), X, X.T.contiguous()))}
    assert bare == {
        "Shard(dim=0), Replicate() -> Shard(dim=0)",
        "Replicate(), Shard(dim=1) -> Shard(dim=1)",
        "Shard(dim=1), Shard(dim=0) -> Partial(sum)",
        "Partial(sum), Replicate() -> Partial(sum)",
        "Replicate(), Partial(sum) -> Partial(sum)",
    }
    most = [Sig((0, R), (0,)), Sig((R, 1), (1,)), Sig((P, R), (P,)), Sig((R, P), (P,))]
    (missing,) = search(case("torch.mm", only(*most), X, X.T.contiguous()))
    assert line(missing) == "Shard(dim=1), Shard(dim=0) -> Partial(sum)"


def test_what_follows_by_a_local_cut_is_not_listed() -> None:
    found = {line(sig) for sig in search(case("torch.mul", only(), X, X))}
    assert found == {
        "Shard(dim=0), Shard(dim=0) -> Shard(dim=0)",
        "Shard(dim=1), Shard(dim=1) -> Shard(dim=1)",
        "Partial(sum), Replicate() -> Partial(sum)",
        "Replicate(), Partial(sum) -> Partial(sum)",
    }


def test_a_choice_among_equals_must_point_at_one() -> None:
    tied = torch.tensor([[1.0, 1.0, 0.0, 1.0, 1.0]])
    right = case("torch.topk", table.OPS["torch.topk"].rule, tied, k=2)
    assert prove(right).false == []
    assert prove(case("torch.topk", only(Sig((1,), (R, R))), tied, k=2)).false


def test_pieces_of_the_wrong_shape_are_no_result() -> None:
    bench = Bench(2)
    with pytest.raises(Mismatch, match="shape"):
        bench.join([torch.ones(2, 3), torch.ones(3, 3)], 0, (5, 3))
    with pytest.raises(Mismatch, match="replicas"):
        bench.join([torch.ones(2), torch.zeros(2)], R, (2,))


@pytest.mark.parametrize("op", PARTIAL_CODES)
@pytest.mark.parametrize("num", [2, 3, 4])
def test_pending_pieces_add_up_and_none_is_the_value(op: str, num: int) -> None:
    bench, draw = Bench(num), torch.Generator().manual_seed(0)
    pieces = bench.cut(X, PARTIAL_CODES[op], draw)
    torch.testing.assert_close(bench.join(pieces, PARTIAL_CODES[op], X.shape), X)
    assert not any(torch.equal(piece, X) for piece in pieces)


@pytest.mark.parametrize(
    "entry",
    ["addmm", "softmax", "fft.rfft", "linalg.solve", "cumsum", "nn.functional.layer_norm", "where", "amax", "tril", "igamma"],
)
def test_nothing_is_left_without_a_reason(entry: str) -> None:
    """A few entries; ``python -m dtorch ops --search`` goes through all of them."""
    found = [f"{f.op}: {f.signature} in {f.example}" for f in missing_signatures(entry) if f.reason is None]
    assert found == []


def test_the_search_is_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "--search", "-k", "trapz"]) == 0
    said = capsys.readouterr()
    assert "torch._C._VariableFunctions.trapz: Shard(dim=0) -> Shard(dim=0)" in said.out
    assert "0 of them without a reason" in said.err
    assert main(["ops", "--search", "-k", "no such op"]) == 2
    assert "no entry whose name contains 'no such op'" in capsys.readouterr().err
