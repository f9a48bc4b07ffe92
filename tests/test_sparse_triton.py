"""The Triton kernels of sparse attention, under Triton's interpreter, against a dense masked softmax in float64."""

from helpers import kernels, sparse


def test_triton_is_dense_masked_attention():
    kernels.interpret(script=sparse.__file__)
