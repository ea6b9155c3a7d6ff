// The draft cache and a device that drafts for it: docs/drafting_gpu.md.
#include <algorithm>

#include "draft_cache.h"
#include "lookup_mirror.h"

namespace speceyes::drafting {

LookupMirror& DraftCache::mirror() {
  if (mirror_ == nullptr) mirror_ = std::make_unique<LookupMirror>(text_, forest_.data(), kSources, &estimator_);
  return *mirror_;
}

DraftCache::RowsAnswer DraftCache::lookup_rows(const int64_t* requests, int32_t batch, const int32_t* caps, int most, bool settled,
                                               lookup::Row* out) {
  batch_++;
  for (int32_t b = 0; b < batch; b++) {
    Live& r = live_.at(requests[b]);
    if (r.batch == batch_) return RowsAnswer::kNamedTwice;
    r.batch = batch_;
    if (r.structure != nullptr && !options_.counts_only) return RowsAnswer::kStructured;
  }
  for (int32_t b = 0; b < batch; b++) {
    Live& r = live_.at(requests[b]);
    r.drafted.clear();
    r.source.clear();
    r.judged.clear();
    r.sent = 0;
    lookup::Row& row = out[b];
    row = {};
    row.last = r.text.length > 0 ? r.last : kNone;
    row.cap = int16_t(caps == nullptr ? most : std::clamp(caps[b], 0, most));
    row.run = uint8_t(std::min(r.run, 255));
    Token said[kMaxDepth];
    const Context context{said, settled ? text_.read_back(row.last, said, options_.max_depth) : 0};
    for (int s = 0; s < kSources; s++) {
      row.root[s] = asks(r, s) ? r.roots[s] : kNone;
      row.at[s] = kNone;
      if (row.root[s] == kNone || !settled) continue;
      forest_[size_t(s)].settle(r.roots[s], r.cursor[s], context);
      row.at[s] = r.cursor[s].match.at;
      row.length[s] = uint8_t(r.cursor[s].match.length);
    }
  }
  return RowsAnswer::kDone;
}

void DraftCache::adopt(const DeviceDrafts& d) {
  for (int32_t b = 0; b < d.batch; b++) {
    const auto it = live_.find(d.requests[b]);
    if (it == live_.end()) continue;
    Live& r = it->second;
    r.sent = std::clamp(d.lengths[b], 0, d.most);
    r.drafted.assign(d.tokens + int64_t(b) * d.most, d.tokens + int64_t(b) * d.most + r.sent);
    r.source.assign(d.source + int64_t(b) * d.most, d.source + int64_t(b) * d.most + r.sent);
    for (uint8_t& s : r.source) by_source_.proposed[s = std::min<uint8_t>(s, kSources - 1)]++;
    r.judged.clear();
    stats_.proposed += r.sent;
    if (options_.counts_only) continue;
    const Position* judged = d.positions + int64_t(b) * (d.most + 1);
    r.judged.assign(judged, judged + std::clamp(d.judged[b], 0, r.sent + 1));
    stats_.judged += d.judged[b];
    if (int64_t(r.judged.size()) > r.sent) r.drafted.push_back(r.judged.back().best.token);
    r.source.resize(r.drafted.size());
  }
}

}  // namespace speceyes::drafting
