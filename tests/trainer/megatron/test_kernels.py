"""Kernels of activations and norms, under Triton's interpreter, beside torch in fp64; and who calls them for what."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}

BESIDE_TORCH = """
import itertools
import torch
import torch.nn.functional as F
from trainer.megatron.activations import kernel as activations
from trainer.megatron.norms import kernel as norms

BOUND = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
torch.manual_seed(0)


def close(found, expected, bound):
    assert found.shape == expected.shape
    assert (found.double() - expected).abs().max() <= bound * expected.abs().max(), (found, expected)


def drawn(*shapes, kind):
    given = [torch.randn(shape, dtype=kind) for shape in shapes]
    return given, [one.double().requires_grad_() for one in given]


for kind, bound in BOUND.items():
    (x, bias, gradient), (exact, exact_bias, exact_gradient) = drawn((9, 2, 300), (300,), (9, 2, 300), kind=kind)
    expected = F.gelu(exact + exact_bias, approximate="tanh")
    expected.backward(exact_gradient)
    close(activations.bias_gelu(bias, x), expected, bound)
    apart = x.transpose(0, 1).contiguous().transpose(0, 1)  # rows that do not lie behind one another
    close(activations.bias_gelu(bias, apart), expected, bound)
    for found, of in zip(activations.bias_gelu_back(gradient, bias, x), (exact, exact_bias)):
        close(found, of.grad, bound)
    close(activations.bias_add(x, bias, gradient), exact + exact_bias + exact_gradient, bound)
    tall = torch.randn((520, 2, 300), dtype=kind)
    close(activations.column_sums(tall), tall.double().sum((0, 1)), 1e-5)
    close(activations.column_sums(tall.transpose(0, 1)), tall.double().sum((0, 1)), 1e-5)

    for width, weighted in itertools.product((700, 1024), (True, False)):
        (x, gradient), (exact, exact_gradient) = drawn((11, 2 * width), (11, width), kind=kind)
        weights = torch.rand(11, 3)[:, 1:2] if weighted else None  # which do not lie behind one another
        exact_weights = weights.double().requires_grad_() if weighted else torch.ones(())
        gate, up = exact.chunk(2, -1)
        expected = F.silu(gate) * up * exact_weights
        expected.backward(exact_gradient)
        close(activations.swiglu(x, weights), expected, bound)
        of_x, of_weights = activations.swiglu_back(gradient, x, weights)
        close(of_x, exact.grad, bound)
        assert weighted or of_weights is None
        if weighted:
            close(of_weights, exact_weights.grad, bound)

    for width, centered, biased in itertools.product((96, 1280), (True, False), (True, False)):
        shapes = (9, width), (width,), (width,), (9, width)
        (x, weight, bias, gradient), (exact, exact_weight, exact_bias, exact_gradient) = drawn(*shapes, kind=kind)
        scale = exact_weight + 1 if centered else exact_weight
        roots = torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-5)
        expected = F.layer_norm(exact, (width,), scale, exact_bias, 1e-5) if biased else exact * roots * scale
        expected.backward(exact_gradient)
        found, means, spreads = norms.forward(x, weight, bias if biased else None, 1e-5, centered)
        close(found, expected, bound)
        given = gradient, x, means if biased else None, spreads, weight, centered
        of_x, of_weight, of_bias = norms.backward(*given)
        close(of_x, exact.grad, bound)
        close(of_weight, exact_weight.grad, bound)
        if biased:
            close(of_bias, exact_bias.grad, bound)
        of_x, *frozen = norms.backward(*given, trained=False)
        close(of_x, exact.grad, bound)
        assert not any(one.any() for one in frozen)
        past = torch.randn((9, width), dtype=kind)
        of_both, of_weight, _ = norms.backward(*given, past=past)
        close(of_both, exact.grad + past.double(), bound)
        close(of_weight, exact_weight.grad, bound)
        assert torch.equal(norms.backward(*given, trained=False, past=past)[0], of_both)
"""

CALLED = """
from types import SimpleNamespace
import torch
from trainer.megatron import activations, norms

theirs = lambda name: lambda *given: (name, *given)
names = "layernorm_fwd", "layernorm_bwd", "rmsnorm_fwd", "rmsnorm_bwd"
engine = SimpleNamespace(**{name: theirs(name) for name in names}, quantize=lambda x, by: by(x))
_, (layernorm_fwd, layernorm_bwd, rmsnorm_fwd, rmsnorm_bwd) = norms._functions(engine)


def rms(width, out=None, quantizer=None):
    x, weight = torch.ones(3, width), torch.nn.Parameter(torch.ones(width))
    return rmsnorm_fwd(x, weight, 1e-5, out, quantizer, None, 0, False)


assert rms(2048)[0] == rms(512)[0] == rms(32768)[0] == "rmsnorm_fwd"  # it has kernels for those, or rows are too long
assert rms(1280, out=torch.ones(3, 1280))[0] == "rmsnorm_fwd"
found, nothing, spreads = rms(1280)
assert nothing is None and torch.allclose(found, torch.ones(3, 1280), atol=1e-4)
assert torch.equal(rms(1280, quantizer=lambda x: -x)[0], -found)

x, gradient = torch.randn(3, 1280), torch.randn(3, 1280)
weight = torch.nn.Parameter(torch.ones(1280))
with torch.no_grad():  # a view says that it is not trained
    assert rmsnorm_bwd(gradient, x, spreads, weight.view(-1), 0, False)[1].any()
assert rmsnorm_bwd(gradient, x, spreads, weight, 0, False)[1].any()
assert not rmsnorm_bwd(gradient, x, spreads, weight.requires_grad_(False), 0, False)[1].any()
assert layernorm_fwd(torch.ones(3, 512), torch.ones(512), None, 1e-5, None, None, None, 0, False)[0] == "layernorm_fwd"

summed = activations._adding(lambda *given: given)
x, bias, residual = torch.randn(5, 3, 40), torch.randn(40, requires_grad=True), torch.randn(5, 3, 40)
assert summed((x, bias), residual, 0.1)[2] == 0.1  # dropout stays torch's
assert summed((x, None), residual, 0.0)[0] == (x, None)
found = summed((x.requires_grad_(), bias), residual.requires_grad_(), 0.0)
assert torch.allclose(found, x + bias + residual)
found.backward(torch.ones_like(found))
assert torch.equal(x.grad, torch.ones_like(x)) and torch.equal(residual.grad, torch.ones_like(x))
assert torch.equal(bias.grad, torch.full((40,), 15.0))
turned = summed((x, bias), residual, 0.0).transpose(0, 1)
turned.backward(torch.ones(3, 5, 40))  # a gradient whose rows do not lie behind one another
assert torch.equal(bias.grad, torch.full((40,), 30.0))
"""

BESIDE_A_RESIDUAL = """
from types import SimpleNamespace
import torch
from trainer.megatron import activations, norms
from trainer.megatron.norms import residual

unknown = dict.fromkeys(("layernorm_fwd", "layernorm_bwd", "rmsnorm_fwd", "rmsnorm_bwd"))
_, (layernorm_fwd, layernorm_bwd, *_) = norms._functions(SimpleNamespace(**unknown))
adds = residual.take  # by whom what came past is added


class Linear(torch.autograd.Function):  # as Transformer Engine's, of a norm and a product
    @staticmethod
    def forward(ctx, x, weight, bias, product, returned):
        found, means, spreads = layernorm_fwd(x.view(-1, 1280), weight, bias, 1e-5, None, None, None, 0, False)
        ctx.save_for_backward(x, weight, means, spreads, found, product)
        ctx.return_layernorm_output, ctx.grad_output_quantizer = returned, None
        return (found @ product).view(x.shape), (found.view(x.shape) if returned else None), None

    @staticmethod
    def backward(ctx, gradient, normed, _):
        x, weight, means, spreads, found, product = ctx.saved_tensors
        gradient = gradient.view(-1, 1280)
        of_normed = gradient @ product.T + (normed.view(-1, 1280) if ctx.return_layernorm_output else 0)
        if later:
            residual.take = lambda like: None
        of_x, of_weight, of_bias = layernorm_bwd(of_normed, x.view(-1, 1280), means, spreads, weight, 0, False)
        residual.take = adds
        return of_x.view(x.shape), of_weight, of_bias, found.T @ gradient, None


torch.manual_seed(0)
split = residual.splitting(Linear, lambda x, weight: ours)
summed = activations._adding(None)
leaves = [torch.randn(shape).requires_grad_() for shape in ((2, 3, 1280), (1280,), (1280,), (1280, 1280), (1280,))]


def layers(function, returned):
    start, weight, bias, product, added = leaves
    x = start * 1.0
    for _ in range(3):
        out, normed, _ = function.apply(x, weight, bias, product, returned)
        x = summed((out + normed if returned else out, added), x, 0.0)
    return x


def gradients(*how):
    out = layers(*how)
    return out.detach(), *torch.autograd.grad(out.pow(2).mean(), leaves)


for returned in (False, True):
    ours = later = False
    expected = gradients(split, returned)
    assert residual._split is None
    for later in (False, True):  # the second time, the norm's kernel does not add what came past
        ours = True
        for one, other in zip(gradients(split, returned), expected, strict=True):
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-6 * other.abs().max().item()), (returned, later)
        assert residual._split is None and residual._incoming is None

ours, later = True, False
x, weight, bias, product, _ = leaves
out, *_ = split.apply(x, weight, bias, product, False)  # a norm with nothing past it
other = x * 1.0
assert residual.past(other) is other and residual._split is None
alone = torch.autograd.grad(out.sum(), x)
expected = torch.autograd.grad((torch.layer_norm(x, (1280,), weight, bias, 1e-5) @ product).sum(), x)
assert torch.allclose(alone[0], expected[0], atol=1e-3)
with torch.no_grad():
    assert residual.past(x) is x



def readers(out):
    # how many functions have read what the first layer was given
    nodes, found, seen = [out.grad_fn], 0, set()
    while nodes:
        following = [one for one, _ in nodes.pop().next_functions if one is not None]
        found += sum(one.name() == "MulBackward0" for one in following)
        nodes += {*following} - seen
        seen |= {*following}
    return found


assert readers(out := layers(split, False)) == 1
ours = False
assert readers(out := layers(split, False)) == 2
ours = True

unfused = residual._past(lambda training: lambda x_with_bias, residual, prob: x_with_bias[0] + residual)(True)
out, *_ = split.apply(x, weight, bias, product, False)
assert residual._split[0] is x and torch.equal(unfused((out, None), x, 0.0), out + x) and residual._split is None
"""


def interpreted(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_activations_and_norms_and_their_gradients_are_those_of_torch():
    interpreted(BESIDE_TORCH)


def test_what_a_kernel_does_not_know_stays_with_transformer_engine_and_torch():
    interpreted(CALLED)


def test_the_gradient_of_a_residual_is_added_by_the_norm_s_kernel():
    interpreted(BESIDE_A_RESIDUAL)
