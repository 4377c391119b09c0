"""What the kernels can run; a CPU's reference runs every problem."""

from .. import checks
from .problem import CompressProblem, QSAProblem


def require_compress(problem: CompressProblem) -> None:
    """NotImplementedError unless the compress kernel runs the problem."""
    _require("compress", "index_dim", problem.index_dim, range(1, 257))


def require_select(problem: QSAProblem) -> None:
    """NotImplementedError unless the selection kernels run the problem."""
    _require("select", "the dtype of index_query", problem.query_dtype, checks.HALF)
    _require("select", "index_heads", problem.index_heads, range(1, 9))
    _require("select", "index_dim", problem.index_dim, range(16, 257))
    _require("select", "topk = budget / compress_ratio", problem.topk, range(1, 2049))


def require_attend(problem: QSAProblem) -> None:
    """NotImplementedError unless the attention kernels run the problem."""
    _require("attend", "the dtype of query", problem.query_dtype, checks.HALF)
    _require("attend", "head_dim", problem.head_dim, (64, 128, 256))
    _require("attend", "num_qo_heads / num_kv_heads", problem.group_size, range(1, 17))


def _require(call: str, name: str, value: int | str, allowed: range | tuple) -> None:
    if value not in allowed:
        wanted = f"{allowed[0]} to {allowed[-1]}" if isinstance(allowed, range) else allowed
        raise NotImplementedError(f"qsa.{call} on a GPU needs {name} in {wanted}, got {value}")
