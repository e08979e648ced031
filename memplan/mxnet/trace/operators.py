"""What memplan knows of MXNet's operators that MXNet does not tell: read in its source, 1.9.1."""

from __future__ import annotations

import re
from collections.abc import Mapping

from memplan.mxnet.trace.nnvm import Node
from memplan.mxnet.trace.user_operators import is_of_library

# FIgnoreInputs: inputs that the operator looks at for their shape only.
_IGNORED_INPUTS = {
    "_identity_with_attr_like_rhs": (1,),
    "reshape_like": (1,),
    "zeros_like": (0,),
    "ones_like": (0,),
    "_contrib_arange_like": (0,),
    "_npi_full_like": (0,),
}

CONVOLUTIONS = ("Convolution", "Deconvolution")

# Layers of recurrent networks, for all steps of time at once.
RECURRENT = ("RNN", "_npx_rnn")

# The op that runs user code.
CUSTOM = "Custom"

# An attribute of an op that MXNet calls by itself, in no graph: a PReLU's backward op writes over
# nothing there. Its value is another for every op, for equal ones are not merged there.
APART = "__memplan_apart__"

_RANDOM = re.compile(
    r"random(?!_pdf)|sample_|_sample$|shuffle|multinomial|[Dd]ropout|_npi_(normal|uniform|"
    r"bernoulli|exponential|gamma|laplace|logistic|gumbel|rayleigh|weibull|pareto|powerd|choice|"
    r"permutation)(_n)?$|^(normal|uniform)$"
)

# MXNet's generators of random numbers, as operators request them, each of which draws from one
# (src/resource.cc, and seen on a CPU). A GPU has others of both names, and cuDNN a third that drops
# for Dropout and RNN alike: these were read of only.
GENERATORS = RANDOM, PARALLEL_RANDOM = ("kRandom", "kParallelRandom")

# Those that draw from the first of them.
_OF_RANDOM = re.compile(
    r"^_npi_(?!random_)|_image_random_|shuffle$|_multinomial$|^_contrib_dgl_|^RNN$|^_npx_rnn$"
)

_STATE_OR_USER_CODE = frozenset(
    """RNN _npx_rnn Custom _CustomFunction _foreach _while_loop _cond _CachedOp _Native _NDArray
    _contrib_SyncBatchNorm IdentityAttachKLSparseReg _CrossDeviceCopy""".split()
)

# Operators that may drop some of what they read, in training, and their rates where none is given.
_DROPPING = {"Dropout": 0.5, "RNN": 0.0, "_npx_rnn": 0.0}

# A copy of these computes wrong numbers, silently, or aborts, where nobody reads its output.
_NEVER_MIRRORED = frozenset(
    """LayerNorm GroupNorm Embedding pick take batch_take gather_nd scatter_nd _scatter_set_nd
    one_hot _histogram BatchNorm_v1 CTCLoss _npx_layer_norm _npx_embedding _npx_pick Convolution_v1
    _contrib_SparseEmbedding Crop diag hard_sigmoid _contrib_DeformableConvolution
    _contrib_ModulatedDeformableConvolution _np_diag _np_diagflat _np_diagonal _np_moveaxis
    _npi_pad""".split()
)

# The backward ops of these write zeros, whatever MXNet takes them to read.
_ZERO_GRADIENTS = frozenset(
    """_contrib_MultiBoxDetection _contrib_MultiBoxPrior _contrib_MultiBoxTarget
    _contrib_MultiProposal _contrib_Proposal""".split()
)

# The backward ops of these may write something where they read zeros.
_ADDED_GRADIENTS = frozenset({CUSTOM, "IdentityAttachKLSparseReg"})

# Operators that hold networks.
FOREACH, WHILE_LOOP, COND = _LOOPS_AND_BRANCHES = ("_foreach", "_while_loop", "_cond")

# The attribute by which MXNet knows the ops of the body of a loop, or branch, while it is made.
LOOP = "__subgraph_name__"

# Operators with several outputs whose copies were seen to be right
# (tests/realise/test_mirror.py): any other one may skip its hidden outputs where a copy's main
# output is not read.
_SEVERAL_OUTPUTS_SAFE = frozenset(
    "BatchNorm Pooling LeakyReLU SliceChannel LRN L2Normalization InstanceNorm".split()
)

# A begin state of mx.rnn has the shape (0, 8): MXNet infers the rest.
_UNKNOWN_DIMENSION = re.compile(r"(?<![0-9])0(?![0-9])|-1|None")

# Operators that update an input (FMutateInputs), such as optimizers.
_MUTATES = re.compile(r"_update$|adamw|lamb|reset_arrays|^_?multi_|preloaded_multi")


# Lookups of rows in a table, which is their second input.
_SPARSE_EMBEDDING = "_contrib_SparseEmbedding"
EMBEDDINGS = frozenset({"Embedding", _SPARSE_EMBEDDING})

# Norms by the statistics of a batch, in training.
NORMS_OF_BATCHES = frozenset(
    "BatchNorm BatchNorm_v1 _contrib_BatchNormWithReLU _contrib_SyncBatchNorm".split()
)

# What a BatchNorm's cudnn_off was before a mirror plan set it ("": nothing).
CUDNN_OFF_BEFORE = "__memplan_cudnn_off_before__"

# Of an identity op that a mirror plan put behind an op, whose name it took: that it did.
READS_FOR_PLAN = "__memplan_reads_for_plan__"


def must_not_be_in_place(node: Node) -> bool:
    """Does ``node`` compute garbage where it writes over what it reads, as MXNet lets it?

    Two do, which may where they write as many numbers as they read. An np.ediff1d that puts one
    before or behind the differences reads what it has written (numpy/np_ediff1d_op-inl.h). An
    np.diff with n=0 writes zeros before it reads (numpy/np_diff-inl.h).
    """
    if node.op not in ("_npi_ediff1d", "_npi_diff"):
        return False
    source, result = node.infos.inputs[0], node.infos.outputs[0]
    return source is not None and result is not None and source.nelements == result.nelements


def is_gradient_of_slopes(node: Node) -> bool:
    """Is ``node`` the backward op of a PReLU?

    It computes the gradient of the slopes last, and reads what it may have written over by then:
    the gradient of the output, over which goes that of the data (leaky_relu-inl.h).
    """
    forward = node.forward
    if node.op != "_backward_LeakyReLU" or forward is None:
        return False
    return forward.attrs.get("act_type") == "prelu"


def keeps_gradient(node: Node) -> bool:
    """Is ``node`` one of these that must not write over the gradient of the output?"""
    return is_gradient_of_slopes(node) and node.forward is not None and APART in node.forward.attrs


def ignored_inputs(node: Node) -> tuple[int, ...]:
    """Positions of the inputs of which ``node`` reads only the shape."""
    if node.op.startswith(("_random_", "_sample_")) and node.op.endswith("_like"):
        return (0,)
    return _IGNORED_INPUTS.get(node.op, ())


def places_of_tensors(node: Node) -> list[int]:
    """The inputs of ``node`` that are tensors of its step, those that its op has."""
    ignored = ignored_inputs(node)
    return [
        place
        for place, (source, _) in enumerate(node.inputs)
        if not source.is_variable and place not in ignored
    ]


def is_random(node: Node) -> bool:
    """Does ``node`` draw random numbers?"""
    if node.op == "LeakyReLU":
        return node.attrs.get("act_type") == "rrelu"
    return _RANDOM.search(node.op) is not None


def draws_in_training(node: Node) -> bool:
    """Does ``node`` draw random numbers in training? What drops at a rate of zero does not."""
    if node.op in _DROPPING:
        return float(node.attrs.get("p", _DROPPING[node.op])) > 0
    return is_random(node)


def generator_of(op: str) -> str:
    """From which of MXNet's generators does ``op`` draw on a CPU, if it draws random numbers?"""
    return RANDOM if _OF_RANDOM.search(op) else PARALLEL_RANDOM


def depends_on_mode(node: Node) -> bool:
    """Does ``node`` compute something else in training than in inference, or may it?

    It asks OpContext::is_train. So do more of them, for the last bits at most: an RNN, which drops
    between its layers only, and which asks whether a gradient is wanted, too, and a SoftmaxOutput.
    """
    if node.op in NORMS_OF_BATCHES:
        return not uses_global_statistics(node)
    if node.op in _DROPPING or node.op == "LeakyReLU":
        has_one_layer = node.attrs.get("num_layers") == "1"
        may_stop = node.attrs.get("mode") != "always" and not has_one_layer
        return draws_in_training(node) and may_stop
    return node.op == CUSTOM


def has_state_or_user_code(node: Node) -> bool:
    """Does ``node`` keep a state between forward and backward, or run code of the user's?"""
    return node.op in _STATE_OR_USER_CODE or is_of_library(node.op)


def may_draw(node: Node) -> bool:
    """May ``node`` draw random numbers? What runs user code may, in the backward pass, too."""
    if node.op.startswith("_backward"):
        return runs_user_code(node.op) or (
            node.forward is not None and is_of_library(node.forward.op)
        )
    return is_random(node) or has_state_or_user_code(node)


def is_made_of_symbol(node: Node) -> bool:
    """Is ``node`` a Custom op or a loop, of which no other call can be made than a Symbol's?"""
    return node.op == CUSTOM or is_loop_or_branch(node)


def is_loop_or_branch(node: Node) -> bool:
    """Does ``node`` hold networks of its own?"""
    return node.op in _LOOPS_AND_BRANCHES


def overwrites_what_it_reads(node: Node) -> bool:
    """Does what the backward op of ``node`` computes depend on the memory that it runs in?

    With ``out_grad`` that of a SoftmaxOutput multiplies by its output, for the gradient of that
    (src/operator/softmax_output-inl.h), and may have written over it where it dies there.
    """
    return node.op == "SoftmaxOutput" and is_true(node.attrs.get("out_grad"))


def runs_user_code(op: str) -> bool:
    """Is such an op a Custom op, or the backward op of one?

    MXNet shows user code every attribute, those with hidden names, too, and crashes where it raises
    because it knows no others than its own.
    """
    return op in (CUSTOM, "_backward_Custom")


def writes_zeros(node: Node) -> bool:
    """Are the gradients of the inputs of ``node`` always zeros, which MXNet does not know?"""
    return node.op in _ZERO_GRADIENTS


def may_ignore_gradients(node: Node) -> bool:
    """May ``node`` give gradients where it gets zeros for those of its outputs?

    So it may where it asks for these, too.
    """
    return node.op in _ADDED_GRADIENTS


def takes_shape_of_reader(node: Node) -> bool:
    """Is this an array of constants or random numbers of which a dimension is not given?"""
    return not node.inputs and bool(_UNKNOWN_DIMENSION.search(node.attrs.get("shape", "")))


def may_be_mirrored(node: Node) -> bool:
    """Does MXNet's mirroring compute ``node`` right, whatever else is flagged?"""
    if is_random(node) or has_state_or_user_code(node):
        return False
    if node.op in _NEVER_MIRRORED or _MUTATES.search(node.op):
        return False
    if node.op == "UpSampling" and node.attrs.get("sample_type") == "bilinear":
        return False  # aborts where nobody reads its output, as those above
    if takes_shape_of_reader(node):
        return False  # that of a copy cannot be inferred
    return node.noutputs == 1 or node.op in _SEVERAL_OUTPUTS_SAFE


def must_be_read(node: Node) -> bool:
    """May MXNet's executor abort or compute garbage where nobody reads the main output of ``node``?

    It asks the operator for no such output, and some kernels then write no other one: a LayerNorm
    no mean. So it is with what the network writes twice: of two equal ops MXNet has all but the
    gradient of an output read the first.
    """
    if node.forward is not None or has_state_or_user_code(node):
        return False
    return node.op not in _SEVERAL_OUTPUTS_SAFE


def may_run_on_cudnn(op: str, attrs: Mapping[str, str]) -> bool:
    """Is this a BatchNorm that cuDNN may compute, and update its moving statistics in forward?"""
    return op == "BatchNorm" and not (
        is_true(attrs.get("use_global_stats")) or is_true(attrs.get("cudnn_off"))
    )


def uses_global_statistics(node: Node) -> bool:
    """Is this a norm that computes by its moving statistics, and leaves them alone?"""
    return node.op in NORMS_OF_BATCHES and is_true(node.attrs.get("use_global_stats"))


def fixes_gamma(node: Node) -> bool:
    """Is this a norm that takes its gamma, its second input, for ones, and writes them there?

    It does unless it is told not to.
    """
    return node.op in NORMS_OF_BATCHES and is_true(node.attrs.get("fix_gamma", "True"))


def is_true(value: str | None) -> bool:
    """Does an attribute say yes? One that is not there says no."""
    return value is not None and value.lower() in ("true", "1")


def has_sparse_gradient(node: Node) -> bool:
    """Is the gradient of the weight of this op, or of that which it differentiates, row_sparse?

    It says so, or it is the older embedding, which has no other one.
    """
    is_always = node.op in (_SPARSE_EMBEDDING, "_backward_SparseEmbedding")
    return is_always or is_true(node.attrs.get("sparse_grad"))


def is_sparse_embedding(node: Node) -> bool:
    """Is this the lookup in a table whose gradient is row_sparse?"""
    return node.op in EMBEDDINGS and has_sparse_gradient(node)
