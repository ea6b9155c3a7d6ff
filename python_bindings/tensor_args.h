// Reading op arguments: every tensor is checked for dtype, device, shape and layout before its pointer is used.
// The public Python layer says the same with Python's exception types; these checks guard direct torch.ops callers.
#pragma once
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "../csrc/separability/separability.h"

namespace speceyes::binding {

using torch::stable::Tensor;

template <class... Parts>
[[noreturn]] void bad_argument(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

struct Place {
  int32_t type;
  int32_t index;
  bool operator==(const Place&) const = default;
};

// The C calls behind these accessors can fail only on an undefined tensor, and then throw.
inline int32_t dtype_of(const Tensor& t) {
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
  return dtype;
}

inline Place place_of(const Tensor& t) {
  Place p;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(t.get(), &p.type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(t.get(), &p.index));
  return p;
}

std::string describe(const Tensor& t);  // "a 2-D float32 tensor of shape [3, 4] on cpu"
std::string describe(Place p);

template <class T>
int32_t dtype_code();
template <>
inline int32_t dtype_code<float>() { return aoti_torch_dtype_float32(); }
template <>
inline int32_t dtype_code<double>() { return aoti_torch_dtype_float64(); }
template <>
inline int32_t dtype_code<int32_t>() { return aoti_torch_dtype_int32(); }
template <>
inline int32_t dtype_code<int64_t>() { return aoti_torch_dtype_int64(); }
template <>
inline int32_t dtype_code<uint8_t>() { return aoti_torch_dtype_uint8(); }

std::string dtype_name(int32_t dtype);

using Shape = std::initializer_list<int64_t>;

void check_place(const Tensor& t, const char* name, Place place);
bool has_shape(const Tensor& t, Shape shape);
[[noreturn]] void bad_tensor(const Tensor& t, const char* name, int32_t dtype, Shape shape, Place place);

// A contiguous tensor of exactly this dtype and shape.
template <class T>
T* dense(const Tensor& t, const char* name, Place place, Shape shape) {
  if (dtype_of(t) != dtype_code<T>() || !(place_of(t) == place) || !has_shape(t, shape) || !t.is_contiguous())
    bad_tensor(t, name, dtype_code<T>(), shape, place);
  return static_cast<T*>(t.data_ptr());
}

// Bytes from one pointer to another. For a dense tensor those of its elements.
struct Extent {
  const char* name;
  const char* begin;
  const char* end;
};
Extent extent(const Tensor& t, const char* name);
// Refuses a written extent (a dense output) that shares memory with another one, with a read one or with the logits.
// Rows of logits that are a wide stride apart leave room between them; columns do not.
void check_apart(const separability::Logits& x, std::initializer_list<Extent> written,
                 std::initializer_list<Extent> read = {});

separability::Logits logits_arg(const Tensor& t, int64_t valid_vocab);
separability::ScoreParams score_params(int64_t k, int64_t valid_vocab, bool include_top1, double eps,
                                       int64_t min_competitors);
separability::Index index_arg(const Tensor& t, const char* name, Place place, int64_t n);
const uint8_t* mask_arg(const std::optional<Tensor>& t, const char* name, Place place, int64_t n);
separability::PoolQuery pool_query(const std::vector<int64_t>& pools, double bottom_share, bool bottom_ceil);
separability::PoolState pool_state(const Tensor& sums, const Tensor& mins, const Tensor& counts, const Tensor& scores,
                                   Place place);

}  // namespace speceyes::binding
