// The `speceyes` torch library itself: what the build is, and the hooks that tests and benchmarks need.
#include <torch/csrc/stable/library.h>

#include "backends.h"

#ifndef SPECEYES_CUDA_ARCHS
#define SPECEYES_CUDA_ARCHS ""
#endif

namespace speceyes::binding {
namespace {

constexpr const char* kIsaNames[] = {"portable", "avx2", "avx512"};

// JSON: {"cuda": bool, "cuda_archs": str, "cuda_stream": bool, "cpu_isa": {name: bool}, "cpu_isa_used": str}.
// cuda_stream: this process's torch offers what the CUDA ops need.
std::string build_info() {
  std::ostringstream json;
  json << std::boolalpha;
#if defined(SPECEYES_WITH_CUDA)
  json << "{\"cuda\": true, \"cuda_stream\": " << (aoti_torch_get_current_cuda_stream != nullptr);
#else
  json << "{\"cuda\": false, \"cuda_stream\": false";
#endif
  json << ", \"cuda_archs\": \"" SPECEYES_CUDA_ARCHS "\", \"cpu_isa\": {";
  for (int isa = 0; isa < 3; isa++)
    json << (isa > 0 ? ", " : "") << '"' << kIsaNames[isa] << "\": " << isa_supported(Isa(isa));
  json << "}, \"cpu_isa_used\": \"" << kIsaNames[int(cpu_isa())] << "\"}";
  return json.str();
}

}  // namespace
}  // namespace speceyes::binding

STABLE_TORCH_LIBRARY(speceyes, m) {
  m.def("build_info() -> str");
  m.def("_force_cpu_isa(int isa) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(speceyes, CompositeExplicitAutograd, m) {
  m.impl("build_info", TORCH_BOX(&speceyes::binding::build_info));
  m.impl("_force_cpu_isa", TORCH_BOX(&speceyes::binding::force_cpu_isa));
}
