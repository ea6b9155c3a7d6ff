#include "cache_image.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string_view>

#include "context_forest.h"
#include "structure.h"

namespace speceyes::drafting {

namespace {

constexpr float kMostSeen = 255;
constexpr int64_t kMostCount = int64_t(1) << 56;  // of a counter: sums of many do not overflow

// Where each response's tokens and blocks begin, and whose it is.
struct Places {
  std::vector<size_t> tokens, blocks;
  std::vector<uint32_t> query;

  explicit Places(const CacheImage& image) {
    const size_t n = image.responses.size();
    tokens.reserve(n + 1);
    blocks.reserve(n + 1);
    query.reserve(n);
    size_t token = 0, block = 0;
    for (const auto& r : image.responses) {
      tokens.push_back(token);
      blocks.push_back(block);
      token += r.tokens;
      for (uint64_t left = r.tokens - r.prompt; image.strict_isolation && left > 0; block++)
        left -= image.blocks[block].tokens;
    }
    tokens.push_back(token);
    blocks.push_back(block);
    for (size_t q = 0; q < image.queries.size(); q++) query.insert(query.end(), image.queries[q].responses, uint32_t(q));
  }
};

void append_response(CacheImage& to, const CacheImage& from, const Places& at, size_t r) {
  to.responses.push_back(from.responses[r]);
  to.tokens.insert(to.tokens.end(), from.tokens.begin() + ptrdiff_t(at.tokens[r]),
                   from.tokens.begin() + ptrdiff_t(at.tokens[r + 1]));
  to.blocks.insert(to.blocks.end(), from.blocks.begin() + ptrdiff_t(at.blocks[r]),
                   from.blocks.begin() + ptrdiff_t(at.blocks[r + 1]));
}

std::string check_estimator(const EstimatorImage& e) {
  if (e.layout == 0)
    return e.cells.empty() && e.weights.empty() && e.steps.empty() && e.inputs == 0 ? "" : "tables without a layout";
  if (e.weights.size() != e.steps.size() * e.inputs) return "weights and rows of the estimator";
  for (size_t i = 0; i < e.cells.size(); i++) {
    const auto& c = e.cells[i];
    if (i > 0 && c.index <= e.cells[i - 1].index) return "the order of the estimator's cells";
    if (!(c.p > 0 && c.p < 1) || !(c.seen >= 1 && c.seen <= kMostSeen && c.seen == std::floor(c.seen))) return "a cell of the estimator";
  }
  for (const uint64_t n : e.steps)
    if (n > uint64_t(kMostCount)) return "a counter of the estimator";
  for (const float w : e.weights)
    if (!std::isfinite(w)) return "a weight of the estimator";
  return "";
}

std::string check_blocks(const CacheImage& image) {
  if (!image.strict_isolation) return image.blocks.empty() ? "" : "blocks without strict isolation";
  size_t b = 0;
  for (const auto& r : image.responses)
    for (uint64_t left = r.tokens - r.prompt; left > 0; b++) {
      if (b == image.blocks.size()) return "the number of blocks";
      const auto& block = image.blocks[b];
      const bool first = left == r.tokens - r.prompt;
      if (!first && block.block == image.blocks[b - 1].block) return "blocks that are one";
      if (block.tokens == 0 || block.tokens > left || block.block < 0 || block.block > kMaxGroups)
        return "a block of a response";
      left -= block.tokens;
    }
  return b == image.blocks.size() ? "" : "the number of blocks";
}

}  // namespace

std::string check(const CacheImage& image) {
  if (image.max_depth < 1 || image.max_depth > kMaxDepth) return "max_depth " + std::to_string(image.max_depth);
  for (const int64_t n : {image.evicted_tokens, image.proposed, image.accepted, image.verified, image.judged})
    if (n < 0 || n > kMostCount) return "a counter";
  uint64_t responses = 0, tokens = 0;
  std::set<std::pair<int64_t, int64_t>> names;
  for (const auto& q : image.queries) {
    if (q.responses == 0) return "a query without a response";
    if (!names.insert({q.agent, q.query}).second) return "a query that is there twice";
    responses += q.responses;
  }
  if (responses != image.responses.size()) return "the number of responses";
  std::vector<uint32_t> left;
  left.reserve(image.responses.size());
  for (const auto& r : image.responses) {
    if (r.prompt >= r.tokens || r.prompt > uint32_t(image.max_depth)) return "the length of a response";
    tokens += r.tokens;
    left.push_back(r.tokens - r.prompt);
  }
  if (tokens != image.tokens.size()) return "the number of tokens";
  for (const Token t : image.tokens)
    if (t < 0) return "a token below 0";
  for (size_t i = 0; i < image.runs.size(); i++) {
    const auto& run = image.runs[i];
    if (i > 0 && run.response == image.runs[i - 1].response) return "the order of time";
    if (run.response >= left.size() || run.tokens == 0 || run.tokens > left[run.response]) return "the order of time";
    left[run.response] -= run.tokens;
  }
  for (const uint32_t n : left)
    if (n != 0) return "the order of time";
  const std::string blocks = check_blocks(image);
  return blocks.empty() ? check_estimator(image.estimator) : blocks;
}

std::string disagreement(const CacheImage& a, const CacheImage& b) {
  const auto differ = [](const char* name, int64_t x, int64_t y) {
    return std::string(name) + " is " + std::to_string(x) + " in one and " + std::to_string(y) + " in the other";
  };
  if (a.max_depth != b.max_depth) return differ("max_depth", a.max_depth, b.max_depth);
  if (a.strict_isolation != b.strict_isolation) return differ("strict_isolation", a.strict_isolation, b.strict_isolation);
  const EstimatorImage &x = a.estimator, &y = b.estimator;
  if (x.layout == 0 || y.layout == 0) return "";
  if (x.layout != y.layout) return differ("the layout of the estimator's tables", x.layout, y.layout);
  if (x.inputs != y.inputs || x.steps.size() != y.steps.size())
    return differ("the size of the estimator's tables", int64_t(x.weights.size()), int64_t(y.weights.size()));
  return "";
}

void keep_newest(CacheImage& image, int64_t max_tokens) {
  size_t gone = 0;
  int64_t held = int64_t(image.tokens.size());
  for (; held > max_tokens; gone++) held -= image.responses[gone].tokens;
  if (gone == 0) return;
  image.evicted_tokens += int64_t(image.tokens.size()) - held;
  const Places at(image);
  CacheImage kept = image;
  kept.responses.erase(kept.responses.begin(), kept.responses.begin() + ptrdiff_t(gone));
  kept.tokens.erase(kept.tokens.begin(), kept.tokens.begin() + ptrdiff_t(at.tokens[gone]));
  kept.blocks.erase(kept.blocks.begin(), kept.blocks.begin() + ptrdiff_t(at.blocks[gone]));
  kept.queries.clear();
  kept.runs.clear();
  for (size_t q = 0, first = 0; q < image.queries.size(); first += image.queries[q++].responses) {
    auto query = image.queries[q];
    if (first + query.responses <= gone) continue;
    if (first < gone) query.responses -= uint32_t(gone - first);
    kept.queries.push_back(query);
  }
  for (const auto& run : image.runs)
    if (run.response >= gone) kept.add_run(run.response - uint32_t(gone), run.tokens);
  image = std::move(kept);
}

// ---- merging ----------------------------------------------------------------------------------------------------------
namespace {

EstimatorImage merge_estimators(const std::vector<CacheImage>& images) {
  EstimatorImage out;
  std::map<uint32_t, std::pair<double, double>> cells;  // index: sum of p * seen, of seen
  std::vector<double> sums, steps;  // of weights by row steps, of row steps
  for (const auto& image : images) {
    const EstimatorImage& e = image.estimator;
    if (e.layout == 0) continue;
    if (out.layout == 0) {
      out.layout = e.layout;
      out.inputs = e.inputs;
      out.weights = e.weights;
      out.steps.assign(e.steps.size(), 0);
      sums.assign(e.weights.size(), 0.0);
      steps.assign(e.steps.size(), 0.0);
    }
    for (const auto& c : e.cells) {
      auto& [p, seen] = cells[c.index];
      p += double(c.p) * c.seen;
      seen += c.seen;
    }
    for (size_t row = 0; row < e.steps.size(); row++) {
      out.steps[row] = std::min(out.steps[row] + e.steps[row], uint64_t(kMostCount));
      for (size_t i = row * e.inputs; i < (row + 1) * e.inputs; i++) sums[i] += double(e.steps[row]) * e.weights[i];
      steps[row] += double(e.steps[row]);
    }
  }
  for (const auto& [index, sum] : cells)
    out.cells.push_back({index, float(sum.first / sum.second), std::min(kMostSeen, float(sum.second))});
  for (size_t i = 0; i < sums.size(); i++)
    if (const double n = steps[i / out.inputs]; n > 0) out.weights[i] = float(sums[i] / n);
  return out;
}

using Name = std::pair<int64_t, int64_t>;

// The queries of all images by age: how many younger ones its image has, the least where several have it.
std::vector<Name> queries_by_age(const std::vector<CacheImage>& images) {
  std::map<Name, std::pair<size_t, size_t>> age;  // younger queries, place in the order given
  size_t place = 0;
  for (const auto& image : images)
    for (size_t q = 0; q < image.queries.size(); q++, place++) {
      const std::pair<size_t, size_t> mine{image.queries.size() - q, place};
      const auto [it, fresh] = age.try_emplace({image.queries[q].agent, image.queries[q].query}, mine);
      if (!fresh && mine.first < it->second.first) it->second = mine;
    }
  std::vector<Name> names;
  for (const auto& [name, at] : age) names.push_back(name);
  std::sort(names.begin(), names.end(), [&](const Name& a, const Name& b) {
    const auto &x = age.at(a), &y = age.at(b);
    return x.first != y.first ? x.first > y.first : x.second < y.second;
  });
  return names;
}

constexpr uint32_t kDropped = ~0u;

}  // namespace

CacheImage merge(const std::vector<CacheImage>& images) {
  CacheImage out;
  out.max_depth = images.at(0).max_depth;
  out.strict_isolation = images[0].strict_isolation;
  out.estimator = merge_estimators(images);

  std::vector<Places> at;
  std::vector<std::vector<uint64_t>> end;  // of every response: response tokens from its last run to its image's end
  std::vector<std::vector<uint32_t>> moved;  // its place in the merged image
  std::vector<uint64_t> total;
  std::map<Name, std::vector<std::pair<size_t, size_t>>> groups;  // per image that has it: image, first response
  for (size_t i = 0; i < images.size(); i++) {
    const CacheImage& image = images[i];
    for (int64_t CacheImage::* n :
         {&CacheImage::evicted_tokens, &CacheImage::proposed, &CacheImage::accepted, &CacheImage::verified,
          &CacheImage::judged})
      out.*n = std::min(out.*n + image.*n, kMostCount);
    at.emplace_back(image);
    moved.emplace_back(image.responses.size(), kDropped);
    end.emplace_back(image.responses.size());
    uint64_t left = 0;
    for (const auto& run : image.runs) left += run.tokens;
    total.push_back(left);
    for (const auto& run : image.runs) end[i][run.response] = left -= run.tokens;
    size_t first = 0;
    for (const auto& q : image.queries) {
      groups[{q.agent, q.query}].emplace_back(i, first);
      first += q.responses;
    }
  }

  for (const Name& name : queries_by_age(images)) {
    const size_t before = out.responses.size();
    auto heads = groups.at(name);  // the next response of every image
    std::map<std::pair<uint32_t, std::string_view>, std::map<size_t, int>> had;  // text: how often, by image
    std::map<std::pair<uint32_t, std::string_view>, int> kept;
    // The copy of the image given first is the one that stays.
    for (const auto& [i, first] : heads) {
      const uint32_t n = images[i].queries[at[i].query[first]].responses;
      for (size_t r = first; r < first + n; r++) {
        const std::pair<uint32_t, std::string_view> text{
            images[i].responses[r].prompt,
            {reinterpret_cast<const char*>(images[i].tokens.data() + at[i].tokens[r]),
             (at[i].tokens[r + 1] - at[i].tokens[r]) * sizeof(Token)}};
        if (++had[text][i] <= kept[text]) continue;
        kept[text]++;
        moved[i][r] = 0;
      }
    }
    for (;;) {
      size_t oldest = heads.size();
      for (size_t h = 0; h < heads.size(); h++) {
        auto& [i, r] = heads[h];
        const uint32_t mine = at[i].query[groups.at(name)[h].second];
        while (r < at[i].query.size() && at[i].query[r] == mine && moved[i][r] == kDropped) r++;
        if (r == at[i].query.size() || at[i].query[r] != mine) continue;
        if (oldest == heads.size() || end[i][r] > end[heads[oldest].first][heads[oldest].second]) oldest = h;
      }
      if (oldest == heads.size()) break;
      auto& [i, r] = heads[oldest];
      moved[i][r] = uint32_t(out.responses.size());
      append_response(out, images[i], at[i], r++);
    }
    out.queries.push_back({name.first, name.second, uint32_t(out.responses.size() - before)});
  }

  std::vector<size_t> next(images.size(), 0);
  for (;;) {
    size_t oldest = images.size();
    for (size_t i = 0; i < images.size(); i++)
      if (next[i] < images[i].runs.size() && (oldest == images.size() || total[i] > total[oldest])) oldest = i;
    if (oldest == images.size()) return out;
    const auto& run = images[oldest].runs[next[oldest]++];
    total[oldest] -= run.tokens;
    if (moved[oldest][run.response] != kDropped) out.add_run(moved[oldest][run.response], run.tokens);
  }
}

}  // namespace speceyes::drafting
