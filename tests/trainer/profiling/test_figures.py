"""trainer/profiling on small made traces: who kept the device waiting, and for how long."""

import gzip
import json

import pytest

from contract.faults import Fault
from trainer.profiling import figures, gaps, report, trace

GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GEMM = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNN"


def event(cat: str, name: str, start: float, end: float, thread: int = 1, **told) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "pid": 9, "tid": thread, "ts": start, "dur": end - start, "args": told}


def kernel(name: str, start: float, end: float, called: float, number: int, call: str = "cudaLaunchKernel", **told):
    """A kernel and the call for it, which takes a microsecond."""
    yield event("cuda_runtime", call, called, called + 1, correlation=number)
    yield event("kernel", name, start, end, thread=7, correlation=number, **told)


def step(*parts, rank: int = 0) -> dict:
    """A step of 1000 microseconds."""
    whole = [event("user_annotation", "ProfilerStep#1", 0, 1000), *(one for part in parts for one in part)]
    return {"traceEvents": whole, "distributedInfo": {"rank": rank}}


def gather(start: float, end: float, number: int, group: str = "TENSOR_MODEL_PARALLEL_GROUP", ranks: str = "[0, 1]"):
    told = {"Process Group Description": group, "Process Group Ranks": ranks}
    told |= {"In msg nelems": 10, "Out msg nelems": 20, "dtype": "BFloat16"}
    return kernel(GATHER, start, end, 5, number, **told)


def test_communication_is_exposed_where_nothing_computes():
    found = figures.of(trace.of(step(kernel(GEMM, 100, 400, 1, 1), gather(300, 600, 2), gather(590, 700, 3, "dp"))))
    assert (found["span"], found["busy"], found["computing"]) == (1.0, 0.6, 0.3)
    assert (found["communication"], found["exposed"]) == (0.4, 0.3)
    [first, second] = found["exposed_by"]
    assert (first["kind"], first["group"]) == ("all-gather", "TENSOR_MODEL_PARALLEL_GROUP")
    assert (first["count"], first["ms"], first["exposed"], first["megabytes"]) == (1, 0.3, 0.2, 0.0)
    assert (second["group"], second["ms"], second["exposed"]) == ("dp", 0.11, 0.11)
    assert found["host"]["launches"] == 3 and found["host"]["collectives"] == 2


def test_annotations_on_the_device_are_no_work():
    doubled = [event("gpu_user_annotation", "nccl:_all_gather_base", 300, 900, thread=7)]
    found = figures.of(trace.of(step(gather(300, 600, 2), doubled)))
    assert found["busy"] == 0.3 and [row["count"] for row in found["kernels"]] == [1]


def test_a_gap_s_cause_is_told_by_the_call_for_what_ends_it():
    waits = [event("cuda_runtime", "cudaStreamSynchronize", 250, 310)]
    late = [event("cpu_op", "aten::mm", 500, 604), event("cpu_op", "aten::empty", 510, 550)]
    found = figures.of(
        trace.of(
            step(
                kernel(GEMM, 0, 200, 0, 1),
                kernel(GEMM, 230, 300, 10, 2),  # asked for long before
                kernel(GEMM, 400, 500, 390, 3),  # the host had waited until 310
                kernel(GEMM, 600, 700, 590, 4),  # the host was late
                kernel(GEMM, 701, 1000, 20, 5),
                waits,
                late,
            )
        )
    )
    idle = {cause: row["count"] for cause, row in found["idle"].items()}
    assert idle == {gaps.DEPENDS: 1, gaps.WAITED: 1, gaps.LATE: 1, gaps.SHORT: 1}
    assert [gap["cause"] for gap in found["gaps"]] == [gaps.WAITED, gaps.LATE, gaps.DEPENDS, gaps.SHORT]
    assert found["gaps"][1]["host"] == [["aten::mm", 0.059], ["aten::empty", 0.04], ["cudaLaunchKernel", 0.001]]
    assert found["gaps"][0]["host"][0] == [gaps.OUTSIDE, 0.089]
    assert sum(row["share"] for row in found["idle"].values()) == pytest.approx(1 - found["busy"])


def test_kernels_that_begin_as_soon_as_they_are_asked_for_make_a_stretch():
    bound = [kernel(GEMM, 100 + 20 * i, 105 + 20 * i, 97 + 20 * i, i) for i in range(20)]
    found = figures.of(trace.of(step(*bound, kernel(GEMM, 600, 900, 500, 99))))
    assert (found["host_bound"]["count"], found["host_bound"]["share"]) == (1, 0.385)
    assert found["host_bound"]["longest"][0]["kernels"] == 20
    assert found["lead_us"] == 2.0 and found["small"]["count"] == 20


def test_a_rank_waits_for_the_one_that_comes_last():
    first = trace.of(step(gather(100, 400, 1), gather(500, 600, 2), rank=0))
    second = trace.of(step(gather(300, 400, 1), gather(500, 600, 2), rank=1))
    [row] = figures.waiting([first.collectives, second.collectives])
    assert (row["ms"], row["waiting"]) == (0.6, 0.2)
    assert figures.waiting([first.collectives]) == []


def test_columns_of_the_picture_add_up_to_the_shares():
    found = figures.of(trace.of(step(kernel(GEMM, 100, 400, 1, 1), gather(300, 600, 2))))
    for name in ("computing", "exposed"):
        assert sum(found["strip"][name]) / gaps.COLUMNS == pytest.approx(found[name], abs=1e-3)


@pytest.mark.parametrize(
    "name, kind",
    [
        (GATHER, "all-gather"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "reduce-scatter"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send, receive, all-to-all"),
        (GEMM, "matrix products"),
        ("void cutlass::device_kernel<GroupedGemm>", "matrix products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel", "norm"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>", "copies and casts"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<c10::BFloat16>>", "element-wise"),
        ("multi_tensor_apply_kernel<L2NormFunctor>", "optimizer"),
        ("Memcpy HtoD (Pageable -> Device)", "copy from the host"),
        ("something_new", "other"),
    ],
)
def test_kernels_are_told_by_their_names(name, kind):
    assert trace.kind_of(name) == kind


def test_a_folder_of_traces_becomes_words_and_a_page(tmp_path):
    for rank in range(2):
        with gzip.open(tmp_path / report.TRACE.format(rank), "wt") as file:
            json.dump(step(kernel("<b>&GEMM", 100, 400, 1, 1), gather(300, 600, 2), rank=rank), file)
    answer = report.report(tmp_path, {"name": "a <run>", "seconds": 0.0005, "layers_times_microbatches": 2.0})
    words = list(report.lines(answer))
    assert words[0].startswith("profile: host-bound: 30% computing, 50% idle")
    assert "per layer and microbatch of 2" in words[0] and "2.00 times as long" in words[0]
    page = (tmp_path / report.PAGE).read_text()
    assert "a &lt;run&gt;" in page and "<b>" not in page and page.count("<svg") == 2
    assert json.loads((tmp_path / report.RESULT).read_text())["ranks"][1]["rank"] == 1


@pytest.mark.parametrize("text", ["", "[]", '{"traceEvents": []}', '{"traceEvents": [{"ph": "X", "dur": 1}]}'])
def test_a_file_that_is_no_trace_is_named(tmp_path, text):
    file = tmp_path / report.TRACE.format(0)
    file.write_bytes(gzip.compress(text.encode()))
    with pytest.raises(Fault, match="not a trace of torch's profiler"):
        report.report(tmp_path)


def test_a_folder_without_traces_is_named(tmp_path):
    with pytest.raises(Fault, match="nothing was profiled"):
        report.report(tmp_path / "nowhere")
