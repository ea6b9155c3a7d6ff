#include "expansion.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace speceyes::drafting {

namespace {

// What a position must be likely for to be dropped on the ground of its price is rounded down by this much.
constexpr double kMargin = 1e-6;
constexpr int kBisections = 9;
// Found on recorded rollouts: how many positions the batch's usual loss weighs against a draft's own, and that a wave of
// few drafts lets each of them do some more steps, because there the pause between two waves costs more than they do.
constexpr float kPrior = 0.25f;
constexpr size_t kFew = 16;
constexpr int32_t kFewSteps = 4;

uint64_t units_of(uint64_t key) { return key >> 31; }
int32_t row_of(uint64_t key) { return kMostRows - 1 - int32_t(key & (kMostRows - 1)); }
uint64_t least_key(uint64_t units) { return units << 31; }
uint64_t last_key(uint64_t units) { return units << 31 | ((1ull << 31) - 1); }

// The step's price for one more draft token behind `total` of them, with `emitted` expected tokens.
struct Prices {
  StepCost cost;
  int64_t plain;
  bool pays(uint64_t units, uint64_t emitted, int64_t total) const {
    const double time = cost.time(plain + total), next = cost.time(plain + total + 1);
    return double(units) * time > double(emitted) * (next - time);
  }
  double price(uint64_t emitted, int64_t total) const {
    const double time = cost.time(plain + total), next = cost.time(plain + total + 1);
    return double(emitted) * (next - time) / time;
  }
};

struct Choice {
  int64_t taken;
  uint64_t emitted, last;  // expected tokens with them; the least key
};

// Moves the keys that are taken to the front: the best ones, as long as they pay and there is room. A key that does not
// pay where it stands in the order is never followed by one that does (the goodput has one peak).
Choice choose(std::vector<uint64_t>& keys, int64_t most, const Prices& prices, int32_t rows) {
  const auto best = std::greater<uint64_t>();
  int64_t hi = int64_t(keys.size()), lo = 0;
  if (hi > most) {
    std::nth_element(keys.begin(), keys.begin() + most - 1, keys.end(), best);
    hi = most;
  }
  uint64_t sum = uint64_t(rows) << 32, all = sum, last = ~0ull;
  for (int64_t i = 0; i < hi; i++) {
    all += units_of(keys[size_t(i)]);
    last = std::min(last, keys[size_t(i)]);
  }
  // Mostly nothing is too dear. The steps' price per token rises: the dearest one is the last.
  const double before_last = prices.cost.time(prices.plain + hi - 1), end = prices.cost.time(prices.plain + hi);
  if (hi == 0 || double(units_of(last)) * prices.cost.time(prices.plain) >
                     (1 + kMargin) * double(all) * (end - before_last + 1e-15 * end))
    return {hi, all, last};
  while (lo < hi) {
    const int64_t mid = lo + (hi - lo) / 2;
    std::nth_element(keys.begin() + lo, keys.begin() + mid, keys.begin() + hi, best);
    uint64_t before = sum;
    for (int64_t i = lo; i < mid; i++) before += units_of(keys[size_t(i)]);
    if (prices.pays(units_of(keys[size_t(mid)]), before, mid)) {
      sum = before + units_of(keys[size_t(mid)]);
      lo = mid + 1;
    } else {
      hi = mid;
    }
  }
  last = ~0ull;
  for (int64_t i = 0; i < lo; i++) last = std::min(last, keys[size_t(i)]);
  return {lo, sum, last};
}

}  // namespace

int64_t Expansion::run(const Drafts& drafts, const Step& step, float min_survival, Grow grow, void* ctx, int32_t* out) {
  std::fill(out, out + drafts.rows, 0);
  waves_ = 0;
  const int64_t most = draft_bound(step);
  if (most <= 0 || drafts.rows <= 0) return 0;
  Prices prices{step.cost, step.plain_tokens};
  if (step.token_budget >= 0) prices.cost.intensity = std::max(prices.cost.intensity, double(step.plain_tokens + most));

  known_.clear();
  seen_.assign(size_t(drafts.rows), 0);
  wanted_.clear();
  for (int32_t r = 0; r < drafts.rows; r++)
    if (drafts.open[r] && drafts.lengths[r] == 0) wanted_.push_back({r, 1, 0});
  alive_.clear();
  for (const GrowTo& w : wanted_) alive_.push_back(w.row);

  uint64_t floor = least_key(1);  // below it nothing is taken
  Choice choice{};
  while (!wanted_.empty()) {
    grow(ctx, wanted_.data(), int32_t(wanted_.size()));
    waves_++;
    for (const GrowTo& w : wanted_) {
      const float* s = drafts.survival + w.row * drafts.stride;
      for (int32_t& i = seen_[size_t(w.row)]; i < drafts.lengths[w.row]; i++) {
        const uint64_t key = slot_key(s[i], i, w.row);
        if (s[i] >= min_survival && key >= floor) known_.push_back(key);
      }
    }
    choice = choose(known_, most, prices, drafts.rows);
    // Whatever is found later, neither what is worse than the last of a full budget will be taken, nor what comes behind
    // those taken now and does not pay there: more of better ones only raise the price.
    if (choice.taken == most) {
      floor = std::max(floor, choice.last);
    } else {
      const double price = prices.price(choice.emitted, choice.taken) * (1 - kMargin);
      const uint64_t units = std::min(units_of(choice.last) - 1, price < 4294967296.0 ? uint64_t(price) : uint64_t(1) << 32);
      floor = std::max(floor, last_key(units));
    }
    known_.erase(std::remove_if(known_.begin() + choice.taken, known_.end(), [&](uint64_t key) { return key < floor; }),
                 known_.end());

    contender_.clear();
    for (const int32_t r : alive_) {
      const int32_t n = drafts.lengths[r];
      if (!drafts.open[r] || n == 0) continue;
      const float last = drafts.survival[r * drafts.stride + n - 1];
      if (last >= min_survival && slot_key(last, n, r) > floor)
        contender_.push_back({std::log2(last), 0, r, int32_t(drafts.stride) - n});
    }
    alive_.clear();  // a draft that is no contender will not be one again
    for (const Row& c : contender_) alive_.push_back(c.row);
    aim(drafts, floor, most);
  }
  const int64_t taken = choice.taken;
  for (int64_t i = 0; i < taken; i++) out[row_of(known_[size_t(i)])]++;
  return taken;
}

// Asks each contender for the positions that it is thought to have above the threshold at which the budget will be full.
void Expansion::aim(const Drafts& drafts, uint64_t floor, int64_t most) {
  wanted_.clear();
  if (contender_.empty()) return;
  float lost = 0, positions = 0, top = -64;
  for (const Row& c : contender_) {
    lost -= c.at;
    positions += float(drafts.lengths[c.row]);
    top = std::max(top, c.at);
  }
  const float usual = std::max(lost / positions, 1e-3f);
  for (Row& c : contender_) c.decay = (kPrior * usual - c.at) / (kPrior + float(drafts.lengths[c.row]));
  // A guess may count every few of them only.
  const size_t apart = 1 + known_.size() / 512;

  const auto expected = [](const Row& c, float level) {
    return std::clamp((c.at - level) / c.decay, 0.f, float(c.room));
  };
  float high = top, low = std::log2(float(std::max<uint64_t>(units_of(floor), 1))) - 32;
  for (int k = 0; k < kBisections; k++) {
    const float level = (high + low) / 2;
    const uint64_t key = least_key(uint64_t(std::exp2(level + 32)));
    int64_t above = 0;
    for (size_t i = 0; i < known_.size(); i += apart) above += known_[i] >= key;
    float more = 0;
    for (const Row& c : contender_) more += expected(c, level);
    (float(above) * float(apart) + more > float(most) ? low : high) = level;
  }
  const uint64_t key = std::max(floor, least_key(uint64_t(std::exp2(high + 32))));
  for (const Row& c : contender_) {
    const int32_t n = drafts.lengths[c.row];
    if (slot_key(drafts.survival[c.row * drafts.stride + n - 1], n, c.row) <= key) continue;
    wanted_.push_back({c.row, n + std::max(1, int32_t(std::ceil(expected(c, high)))), key});
  }
  if (wanted_.size() <= kFew)
    for (GrowTo& w : wanted_) w.length = std::max(w.length, drafts.lengths[w.row] + kFewSteps);
  if (!wanted_.empty()) return;
  for (const Row& c : contender_) wanted_.push_back({c.row, drafts.lengths[c.row] + 1, floor});
}

}  // namespace speceyes::drafting
