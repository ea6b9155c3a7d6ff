// torch ops of the structure tracker: compiled structures and token tables by handle, states as plain bytes in a tensor.
#include "../csrc/drafting/structure.h"

#include <torch/csrc/stable/library.h>

#include <cstring>
#include <tuple>

#include "structure_handles.h"

namespace speceyes::binding {

Handles<const Structure>& structures() {
  static auto* handles = new Handles<const Structure>("structure");  // outlives every Python object
  return *handles;
}
Handles<const TokenBytes>& tables() {
  static auto* handles = new Handles<const TokenBytes>("token_bytes");
  return *handles;
}

namespace {

using drafting::BlockState;

const Place kCpu{aoti_torch_device_type_cpu(), -1};

template <class T>
T* dense_1d(const Tensor& t, const char* name) {
  if (t.dim() != 1 || place_of(t).type != kCpu.type || dtype_of(t) != dtype_code<T>() || !t.is_contiguous())
    bad_argument(name, ": expected a contiguous 1-D ", dtype_name(dtype_code<T>()), " tensor on cpu, got ", describe(t));
  return static_cast<T*>(t.data_ptr());
}

// A refused string is an answer, not an exception: (0, 0, message, position).
std::tuple<int64_t, int64_t, std::string, int64_t> structure_new(std::string text) {
  try {
    auto structure = std::make_shared<const Structure>(drafting::parse_structure(text));
    const int64_t groups = structure->num_groups();
    return {structures().add(std::move(structure)), groups, "", 0};
  } catch (const drafting::StructureError& error) {
    return {0, 0, error.what(), int64_t(error.position)};
  }
}

void structure_release(int64_t structure) { structures().release(structure); }

int64_t token_bytes_new(const Tensor& bytes, const Tensor& offsets) {
  const auto* data = dense_1d<uint8_t>(bytes, "bytes");
  const auto* at = dense_1d<int64_t>(offsets, "offsets");
  const int64_t n = offsets.size(0), size = bytes.size(0);
  if (size > int64_t(UINT32_MAX)) bad_argument("bytes: expected less than 2^32 bytes, got ", size);
  std::vector<uint32_t> begin;
  begin.reserve(size_t(n));
  for (int64_t i = 0; i < n; i++) {
    if (at[i] < (i > 0 ? at[i - 1] : 0) || at[i] > size)
      bad_argument("offsets: expected to rise from 0 to ", size, ", got ", at[i], " at position ", i);
    begin.push_back(uint32_t(at[i]));
  }
  return tables().add(std::make_shared<const TokenBytes>(std::vector<char>(data, data + size), std::move(begin)));
}

void token_bytes_release(int64_t token_bytes) { tables().release(token_bytes); }

BlockState load(const Structure& structure, const Tensor& state) {
  const auto* bytes = dense_1d<uint8_t>(state, "state");
  BlockState s;
  if (state.size(0) != int64_t(sizeof s))
    bad_argument("state: expected ", sizeof s, " bytes, got ", describe(state));
  std::memcpy(&s, bytes, sizeof s);
  if (!structure.valid(s)) bad_argument("state: expected one of this structure's states, got other bytes");
  return s;
}

// blocks[i]: the block after token i.
void structure_feed(int64_t structure, int64_t token_bytes, const Tensor& state, const Tensor& tokens,
                    const Tensor& blocks) {
  const auto automaton = structures().get(structure);
  const auto table = tables().get(token_bytes);
  BlockState s = load(*automaton, state);
  const auto* token = dense_1d<int32_t>(tokens, "tokens");
  auto* block = dense_1d<int32_t>(blocks, "blocks");
  if (blocks.size(0) != tokens.size(0))
    bad_argument("blocks: expected ", tokens.size(0), " values, got ", describe(blocks));
  for (int64_t i = 0; i < tokens.size(0); i++) {
    automaton->feed(s, (*table)[token[i]]);
    block[i] = automaton->block(s);
  }
  std::memcpy(state.data_ptr(), &s, sizeof s);
}

void structure_feed_bytes(int64_t structure, const Tensor& state, const Tensor& bytes) {
  const auto automaton = structures().get(structure);
  BlockState s = load(*automaton, state);
  const auto* data = dense_1d<uint8_t>(bytes, "bytes");
  automaton->feed(s, {reinterpret_cast<const char*>(data), size_t(bytes.size(0))});
  std::memcpy(state.data_ptr(), &s, sizeof s);
}

std::vector<int64_t> structure_open_blocks(int64_t structure, const Tensor& state) {
  const auto automaton = structures().get(structure);
  int open[drafting::kMaxNesting];
  const int n = automaton->open_blocks(load(*automaton, state), open);
  return {open, open + n};
}

int64_t structure_state_size() { return int64_t(sizeof(BlockState)); }

}  // namespace
}  // namespace speceyes::binding

STABLE_TORCH_LIBRARY_FRAGMENT(speceyes, m) {
  m.def("structure_new(str text) -> (int, int, str, int)");
  m.def("structure_release(int structure) -> ()");
  m.def("token_bytes_new(Tensor bytes, Tensor offsets) -> int");
  m.def("token_bytes_release(int token_bytes) -> ()");
  m.def("structure_feed(int structure, int token_bytes, Tensor(a!) state, Tensor tokens, Tensor(b!) blocks) -> ()");
  m.def("structure_feed_bytes(int structure, Tensor(a!) state, Tensor bytes) -> ()");
  m.def("structure_open_blocks(int structure, Tensor state) -> int[]");
  m.def("structure_state_size() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(speceyes, CompositeExplicitAutograd, m) {
  m.impl("structure_new", TORCH_BOX(&speceyes::binding::structure_new));
  m.impl("structure_release", TORCH_BOX(&speceyes::binding::structure_release));
  m.impl("token_bytes_new", TORCH_BOX(&speceyes::binding::token_bytes_new));
  m.impl("token_bytes_release", TORCH_BOX(&speceyes::binding::token_bytes_release));
  m.impl("structure_feed", TORCH_BOX(&speceyes::binding::structure_feed));
  m.impl("structure_feed_bytes", TORCH_BOX(&speceyes::binding::structure_feed_bytes));
  m.impl("structure_open_blocks", TORCH_BOX(&speceyes::binding::structure_open_blocks));
  m.impl("structure_state_size", TORCH_BOX(&speceyes::binding::structure_state_size));
}
