#include "tensor_args.h"

#include <limits>
#include <utility>

namespace speceyes::binding {

using separability::DType;
using separability::kMaxK;
using separability::kMaxVocab;

std::string dtype_name(int32_t dtype) {
  const std::pair<int32_t, const char*> names[] = {
      {aoti_torch_dtype_float32(), "float32"}, {aoti_torch_dtype_float16(), "float16"},
      {aoti_torch_dtype_bfloat16(), "bfloat16"}, {aoti_torch_dtype_float64(), "float64"},
      {aoti_torch_dtype_int32(), "int32"},     {aoti_torch_dtype_int64(), "int64"},
      {aoti_torch_dtype_int16(), "int16"},     {aoti_torch_dtype_int8(), "int8"},
      {aoti_torch_dtype_uint8(), "uint8"},     {aoti_torch_dtype_bool(), "bool"}};
  for (const auto& [code, name] : names)
    if (code == dtype) return name;
  return "dtype#" + std::to_string(dtype);
}

std::string describe(Place p) {
  if (p.type == aoti_torch_device_type_cpu()) return "cpu";
  std::ostringstream text;
  if (p.type == aoti_torch_device_type_cuda())
    text << "cuda:" << p.index;
  else
    text << "device type " << p.type << ':' << p.index;
  return text.str();
}

template <class Sizes>
static std::string list(const Sizes& sizes) {
  std::ostringstream text;
  text << '[';
  const char* separator = "";
  for (int64_t n : sizes) {
    text << separator << n;
    separator = ", ";
  }
  text << ']';
  return text.str();
}

std::string describe(const Tensor& t) {
  std::ostringstream text;
  text << "a " << t.dim() << "-D " << (t.is_contiguous() ? "" : "non-contiguous ") << dtype_name(dtype_of(t))
       << " tensor of shape " << list(t.sizes()) << " on " << describe(place_of(t));
  return text.str();
}

bool has_shape(const Tensor& t, Shape shape) {
  const auto sizes = t.sizes();
  if (sizes.size() != shape.size()) return false;
  size_t d = 0;
  for (int64_t n : shape)
    if (sizes[d++] != n) return false;
  return true;
}

void check_place(const Tensor& t, const char* name, Place place) {
  if (!(place_of(t) == place))
    bad_argument(name, ": expected a tensor on ", describe(place), " like the first argument, got ", describe(t));
}

void bad_tensor(const Tensor& t, const char* name, int32_t dtype, Shape shape, Place place) {
  bad_argument(name, ": expected a contiguous ", dtype_name(dtype), " tensor of shape ", list(shape), " on ",
               describe(place), ", got ", describe(t));
}

Extent extent(const Tensor& t, const char* name) {
  const char* begin = static_cast<const char*>(t.data_ptr());
  return {name, begin, begin + t.numel() * int64_t(t.element_size())};
}

static bool overlap(const Extent& a, const Extent& b) {
  return a.begin < a.end && b.begin < b.end && a.begin < b.end && b.begin < a.end;
}

static bool overlap(const separability::Logits& x, const Extent& out) {
  if (x.rows == 0 || out.begin == out.end) return false;
  const int64_t bytes = x.dtype == DType::kFloat32 ? 4 : 2;
  int64_t outer = x.rows, step = x.row_stride * bytes, inner = x.vocab, inner_step = x.col_stride * bytes;
  if (inner_step > step) std::swap(outer, inner), std::swap(step, inner_step);
  const int64_t length = (inner - 1) * inner_step + bytes;
  const int64_t low = out.begin - static_cast<const char*>(x.data), high = low + (out.end - out.begin);
  // The first run that ends after the output begins must not begin before the output ends.
  int64_t run = 0;
  if (low >= length) run = step == 0 ? outer : (low - length) / step + 1;
  return run < outer && run * step < high;
}

void check_apart(const separability::Logits& x, std::initializer_list<Extent> written,
                 std::initializer_list<Extent> read) {
  const auto refuse = [](const Extent& out, const char* other) {
    bad_argument(out.name, ": expected memory of its own, got a tensor that shares memory with ", other);
  };
  for (const Extent* out = written.begin(); out != written.end(); out++) {
    if (overlap(x, *out)) refuse(*out, "logits");
    for (const Extent* other = written.begin(); other != out; other++)
      if (overlap(*other, *out)) refuse(*out, other->name);
    for (const Extent& input : read)
      if (overlap(input, *out)) refuse(*out, input.name);
  }
}

separability::Logits logits_arg(const Tensor& t, int64_t valid_vocab) {
  const int32_t code = dtype_of(t);
  const bool f32 = code == aoti_torch_dtype_float32(), f16 = code == aoti_torch_dtype_float16();
  if (t.dim() != 2 || !(f32 || f16 || code == aoti_torch_dtype_bfloat16()))
    bad_argument("logits: expected a 2-D float32, float16 or bfloat16 tensor [rows, vocabulary], got ", describe(t));
  const int64_t columns = t.size(1);
  if (valid_vocab < 1 || valid_vocab > columns)
    bad_argument("valid_vocab: expected 1 to ", columns, " (the columns of logits), got ", valid_vocab);
  if (valid_vocab > kMaxVocab)
    bad_argument("valid_vocab: expected at most ", kMaxVocab, ", got ", valid_vocab,
                 "; score larger vocabularies in shards (partial_topk, merge_partials)");
  return {t.data_ptr(), f32 ? DType::kFloat32 : f16 ? DType::kFloat16 : DType::kBFloat16, t.size(0), valid_vocab,
          t.stride(0), t.stride(1)};
}

separability::ScoreParams score_params(int64_t k, int64_t valid_vocab, bool include_top1, double eps,
                                       int64_t min_competitors) {
  if (k < 2 || k > kMaxK) bad_argument("k: expected 2 to ", kMaxK, ", got ", k);
  if (k > valid_vocab) bad_argument("k: expected at most valid_vocab = ", valid_vocab, ", got ", k);
  // A normal float32: a smaller eps flushes to 0, and 0 / 0 is no score.
  if (!(eps >= 1e-37 && eps <= 1e37)) bad_argument("eps: expected a number in 1e-37..1e37, got ", eps);
  if (min_competitors < 1 || min_competitors > std::numeric_limits<int>::max())
    bad_argument("min_competitors: expected at least 1, got ", min_competitors);
  return {int(k), include_top1, float(eps), int(min_competitors)};
}

separability::Index index_arg(const Tensor& t, const char* name, Place place, int64_t n) {
  const int32_t code = dtype_of(t);
  const bool is64 = code == aoti_torch_dtype_int64();
  if (!(is64 || code == aoti_torch_dtype_int32()) || !has_shape(t, {n}) || !t.is_contiguous())
    bad_argument(name, ": expected a contiguous int32 or int64 tensor of shape ", list(Shape{n}), ", got ",
                 describe(t));
  check_place(t, name, place);
  return {t.data_ptr(), is64};
}

const uint8_t* mask_arg(const std::optional<Tensor>& t, const char* name, Place place, int64_t n) {
  if (!t.has_value()) return nullptr;
  if (dtype_of(*t) != aoti_torch_dtype_bool() || !has_shape(*t, {n}) || !t->is_contiguous())
    bad_argument(name, ": expected a contiguous bool tensor of shape ", list(Shape{n}), ", got ", describe(*t));
  check_place(*t, name, place);
  return static_cast<const uint8_t*>(t->data_ptr());
}

separability::PoolQuery pool_query(const std::vector<int64_t>& pools, double bottom_share, bool bottom_ceil) {
  separability::PoolQuery query;
  if (pools.empty() || pools.size() > size_t(separability::kNumPools))
    bad_argument("pools: expected 1 to ", separability::kNumPools, " pool numbers, got ", pools.size());
  for (int64_t pool : pools) {
    if (pool < 0 || pool >= separability::kNumPools)
      bad_argument("pools: expected numbers from 0 to ", separability::kNumPools - 1, ", got ", pool);
    query.pools[query.num_pools++] = int(pool);
  }
  if (!(bottom_share > 0. && bottom_share <= 1.))
    bad_argument("bottom_share: expected a number in (0, 1], got ", bottom_share);
  query.bottom_share = bottom_share;
  query.bottom_ceil = bottom_ceil;
  return query;
}

separability::PoolState pool_state(const Tensor& sums, const Tensor& mins, const Tensor& counts, const Tensor& scores,
                                   Place place) {
  if (scores.dim() != 2)
    bad_argument("scores: expected a 2-D float32 tensor [slots, max_tokens], got ", describe(scores));
  const int64_t slots = scores.size(0), max_tokens = scores.size(1);
  separability::PoolState state;
  state.sums = dense<double>(sums, "sums", place, {slots, 2});
  state.mins = dense<float>(mins, "mins", place, {slots, 2});
  state.counts = dense<int32_t>(counts, "counts", place, {slots, 2});
  state.scores = dense<float>(scores, "scores", place, {slots, max_tokens});
  if (max_tokens == 0) state.scores = nullptr;
  state.slots = slots;
  state.max_tokens = max_tokens;
  return state;
}

}  // namespace speceyes::binding
