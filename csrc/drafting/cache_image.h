// What a draft cache holds, without its trees: the text of ended responses, their order in time, and what was learned.
// Trees are rebuilt from it, so the image says nothing of how the forest is laid out. Design: docs/drafting.md.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "text_store.h"

namespace speceyes::drafting {

// The estimator's tables. `layout` names what cells and weights mean: tables of another layout are of no use.
struct EstimatorImage {
  struct Cell {
    uint32_t index;
    float p, seen;
    bool operator==(const Cell&) const = default;
  };
  uint32_t layout = 0;          // 0: nothing was learned
  std::vector<Cell> cells;      // those that learned, by index
  uint32_t inputs = 0;          // weights of one row
  std::vector<float> weights;   // [rows, inputs]
  std::vector<uint64_t> steps;  // how often each row learned, [rows]
  bool operator==(const EstimatorImage&) const = default;
};

struct CacheImage {
  struct Query {
    int64_t agent, query;
    uint32_t responses;
    bool operator==(const Query&) const = default;
  };
  struct Response {
    uint32_t tokens, prompt;  // tokens held, those of the prompt before the first response token included
    bool operator==(const Response&) const = default;
  };
  struct Run {
    uint32_t response, tokens;
    bool operator==(const Run&) const = default;
  };
  struct Block {
    int32_t block;
    uint32_t tokens;
    bool operator==(const Block&) const = default;
  };

  // Options that must agree.
  int32_t max_depth = 0;
  bool strict_isolation = false;

  int64_t evicted_tokens = 0, proposed = 0, accepted = 0, verified = 0, judged = 0;
  std::vector<Query> queries;       // by their last start, the oldest first
  std::vector<Response> responses;  // query by query, in the order of their ends
  std::vector<Token> tokens;        // response by response
  std::vector<Run> runs;            // response tokens in the order of time: which response went on, by how many
  std::vector<Block> blocks;        // strict isolation: the response tokens' blocks, response by response
  EstimatorImage estimator;
  bool operator==(const CacheImage&) const = default;


  void add_run(uint32_t response, uint32_t n) {
    if (!runs.empty() && runs.back().response == response)
      runs.back().tokens += n;
    else
      runs.push_back({response, n});
  }
};

// Empty, or what contradicts itself. An image that passes can be loaded whatever it was read from.
std::string check(const CacheImage& image);

// Empty, or the option in which the images differ and its two values.
std::string disagreement(const CacheImage& a, const CacheImage& b);

// Drops what eviction would drop first, oldest query first, until at most `max_tokens` are left; counts them as evicted.
void keep_newest(CacheImage& image, int64_t max_tokens);

// One image of many, which agree (see disagreement). A response that several have (agent, query and text are equal) is
// kept as often as the image that has it most often. Time runs back from the end: what began n tokens before its image
// was made counts as said together, ties in the order given; queries likewise. Cells are averaged by how much they saw,
// weights by how often they learned, counters are summed.
CacheImage merge(const std::vector<CacheImage>& images);

}  // namespace speceyes::drafting
