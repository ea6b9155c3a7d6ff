// torch ops for files of draft caches. They return an Outcome.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

#include "cache_file_outcome.h"
#include "draft_cache_handles.h"

namespace speceyes::binding {
namespace {

using drafting::CacheImage;

// The cache is locked while it is copied, not while the file is written.
Outcome draft_cache_save(int64_t handle, std::string path) {
  const auto c = caches().get(handle);
  return outcome_of([&] {
    const CacheImage image = [&] {
      std::lock_guard<std::mutex> guard(c->lock);
      return c->cache.image();
    }();
    drafting::write_cache_file(path, image);
    return std::string();
  });
}

// And whether the estimator's tables were taken.
std::tuple<int64_t, std::string, bool> draft_cache_load(int64_t handle, std::string path) {
  const auto c = caches().get(handle);
  bool tables = true;
  auto [error, message] = outcome_of([&] {
    CacheImage image = drafting::read_cache_file(path);
    std::lock_guard<std::mutex> guard(c->lock);
    return c->cache.load(std::move(image), &tables);
  });
  return {error, std::move(message), tables};
}

void draft_cache_trim(int64_t handle) {
  const auto c = caches().get(handle);
  std::lock_guard<std::mutex> guard(c->lock);
  c->cache.trim();
}

// And the place in `paths` of the file that is refused; paths.size() where it is `out`.
std::tuple<int64_t, std::string, int64_t> cache_files_merge(std::vector<std::string> paths, std::string out) {
  if (paths.empty()) bad_argument("paths: expected at least one file, got none");
  size_t at = 0;
  auto [error, message] = outcome_of([&]() -> std::string {
    std::vector<CacheImage> images;
    for (at = 0; at < paths.size(); at++) {
      images.push_back(drafting::read_cache_file(paths[at]));
      for (size_t i = 0; i < at; i++)
        if (std::string wrong = drafting::disagreement(images[i], images[at]); !wrong.empty())
          return "does not agree with " + paths[i] + ": " + wrong;
    }
    const CacheImage merged = drafting::merge(images);
    images.clear();
    drafting::write_cache_file(out, merged);
    return "";
  });
  return {error, std::move(message), int64_t(at)};
}

// (errno, message, [max_depth, strict_isolation, agents, queries, responses, tokens, response tokens, evicted, proposed,
// accepted, verified, judged, estimator layout, cells])
std::tuple<int64_t, std::string, std::vector<int64_t>> cache_file_info(std::string path) {
  std::vector<int64_t> info;
  auto [error, message] = outcome_of([&] {
    const CacheImage image = drafting::read_cache_file(path);
    std::vector<int64_t> agents;
    for (const auto& q : image.queries) agents.push_back(q.agent);
    std::sort(agents.begin(), agents.end());
    agents.erase(std::unique(agents.begin(), agents.end()), agents.end());
    int64_t said = 0;
    for (const auto& run : image.runs) said += run.tokens;
    info = {image.max_depth, image.strict_isolation, int64_t(agents.size()), int64_t(image.queries.size()),
            int64_t(image.responses.size()), int64_t(image.tokens.size()), said, image.evicted_tokens, image.proposed,
            image.accepted, image.verified, image.judged, image.estimator.layout, int64_t(image.estimator.cells.size())};
    return std::string();
  });
  return {error, std::move(message), std::move(info)};
}

}  // namespace
}  // namespace speceyes::binding

STABLE_TORCH_LIBRARY_FRAGMENT(speceyes, m) {
  m.def("draft_cache_save(int cache, str path) -> (int, str)");
  m.def("draft_cache_load(int cache, str path) -> (int, str, bool)");
  m.def("draft_cache_trim(int cache) -> ()");
  m.def("cache_files_merge(str[] paths, str out) -> (int, str, int)");
  m.def("cache_file_info(str path) -> (int, str, int[])");
}

STABLE_TORCH_LIBRARY_IMPL(speceyes, CompositeExplicitAutograd, m) {
  using namespace speceyes::binding;
  m.impl("draft_cache_save", TORCH_BOX(&draft_cache_save));
  m.impl("draft_cache_load", TORCH_BOX(&draft_cache_load));
  m.impl("draft_cache_trim", TORCH_BOX(&draft_cache_trim));
  m.impl("cache_files_merge", TORCH_BOX(&cache_files_merge));
  m.impl("cache_file_info", TORCH_BOX(&cache_file_info));
}
