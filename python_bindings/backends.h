// The two native backends behind one interface: where an op's arguments live decides which of them runs it.
#pragma once
#include "../csrc/separability/separability_cpu.h"
#include "tensor_args.h"

#if defined(SPECEYES_WITH_CUDA)
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include "../csrc/separability/separability_cuda.h"
#include "cuda_device.h"
// Only libtorch_cuda has it: weak, so that the same file also loads where torch is a CPU build.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);
#endif

namespace speceyes::binding {

using namespace separability;

// torch's thread pool. Ranges are whole multiples of `grain` but the last, as separability_cpu.h promises.
void torch_parallel(int64_t n, int64_t grain, RangeFn fn, void* ctx);

Isa cpu_isa();
void force_cpu_isa(int isa);  // -1: back to best_isa()

class CpuBackend {
 public:
  explicit CpuBackend(const Tensor&) {}

  void rows(const Logits& x, const ScoreParams& p, const RowOut& out) const {
    rows_cpu(x, p, out, cpu_isa(), torch_parallel);
  }
  void rows(const Logits& x, const ScoreParams& p, const RowOut& out, const SlotJob& job) const {
    check_slots(job.slots, x.rows, job.state.slots);
    rows(x, p, out);
    update_slots_cpu(records(out.records), x.rows, job);
  }
  void rows(const Logits& x, const ScoreParams& p, const RowOut& out, const AnswerJob& job) const {
    check_answers(job.cu, job.answers, x.rows);
    rows(x, p, out);
    pool_answers_cpu(records(out.records), x.rows, job, torch_parallel);
  }
  void update_slots(const Scores& s, int64_t n, const SlotJob& job) const {
    check_slots(job.slots, n, job.state.slots);
    update_slots_cpu(s, n, job);
  }
  void read_slots(const PoolState& state, Index slots, int64_t n, const PoolQuery& query, float* out) const {
    if (slots.data != nullptr) check_slots(slots, n, state.slots, 0);
    read_slots_cpu(state, slots, n, query, out);
  }
  void merge_partials(const Partials& in, const ScoreParams& p, const RowOut& out) const {
    merge_partials_cpu(in, p, out, torch_parallel);
  }

 private:
  static Scores records(const float* pairs) { return {pairs, 2, pairs + 1, 2}; }
  // Values are only looked at on the CPU: on a GPU that would cost a synchronisation, and the kernels clamp instead.
  static void check_slots(Index slots, int64_t n, int64_t count, int64_t lowest = -1);
  static void check_answers(Index cu, int64_t answers, int64_t rows);
};

#if defined(SPECEYES_WITH_CUDA)
class CudaBackend {
 public:
  explicit CudaBackend(const Tensor& like) : like_(like), device_(place_of(like).index), guard_(device_) {
    if (aoti_torch_get_current_cuda_stream == nullptr)
      throw std::runtime_error("speceyes_kernels: this process's torch has no CUDA support (libtorch_cuda not loaded)");
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_, &stream_));
    check(use_cuda_device(device_));
  }

  void rows(const Logits& x, const ScoreParams& p, const RowOut& out) const { launch(x, p, out, nullptr, nullptr); }
  void rows(const Logits& x, const ScoreParams& p, const RowOut& out, const SlotJob& job) const {
    launch(x, p, out, &job, nullptr);
  }
  void rows(const Logits& x, const ScoreParams& p, const RowOut& out, const AnswerJob& job) const {
    launch(x, p, out, nullptr, &job);
  }
  void update_slots(const Scores& s, int64_t n, const SlotJob& job) const {
    check(update_slots_cuda(s, n, job, stream_));
  }
  void read_slots(const PoolState& state, Index slots, int64_t n, const PoolQuery& query, float* out) const {
    check(read_slots_cuda(state, slots, n, query, out, stream_));
  }
  void merge_partials(const Partials& in, const ScoreParams& p, const RowOut& out) const {
    check(merge_partials_cuda(in, p, out, stream_));
  }

  void* stream() const { return stream_; }
  // Throws for a cudaError_t.
  static void check(int error) {
    if (error != 0)
      throw std::runtime_error(std::string("speceyes_kernels: CUDA error ") + std::to_string(error) + ": " +
                               cuda_error_text(error) + "; `speceyes collect-env` shows what this build supports");
  }

 private:
  void launch(const Logits& x, const ScoreParams& p, const RowOut& out, const SlotJob* slots,
              const AnswerJob* answers) const {
    const int multiprocessors = cuda_multiprocessors(device_);
    if (multiprocessors < 0) check(-multiprocessors);
    // From torch's allocator: ordered on this stream, and kept by the graph when one is being captured.
    const int64_t bytes[] = {int64_t(workspace_bytes_cuda(x.rows, x.vocab))};
    const Tensor workspace = torch::stable::new_empty(like_, {bytes, 1}, torch::headeronly::ScalarType::Byte);
    check(rows_cuda(x, p, out, slots, answers, workspace.data_ptr(), multiprocessors, stream_));
  }

  const Tensor& like_;
  int32_t device_;
  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_ = nullptr;
};
#endif

}  // namespace speceyes::binding
