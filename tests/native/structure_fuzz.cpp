// Fuzz target of the structure string and its automaton: any bytes are a structure string, a zero byte, a text. The
// string is refused or compiled; then the automaton, byte by byte, must equal reading the text afresh. That takes
// quadratic time: only where the block changes and at every eighth byte.
// With clang: -fsanitize=fuzzer. Otherwise main() mutates its own inputs: structure_fuzz SEED EXECUTIONS.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "structure.h"

using namespace speceyes::drafting;

namespace {

// Blocks open at the end of `text`, by the rules of structure.h as they read. No misspelt tags: see main().
std::vector<int> open_afresh(const StructureSpec& spec, std::string_view text) {
  const auto here = [&](size_t at, std::string_view d) { return text.substr(at).starts_with(d); };
  struct Open {
    int group;
    std::string_view start;
  };
  std::vector<Open> open;
  const auto has_end = [&](const Open& block, std::string_view end) {
    for (const DelimiterPair& pair : spec.groups[size_t(block.group)])
      if (pair.start == block.start && pair.end == end) return true;
    return false;
  };
  for (size_t at = 0; at < text.size();) {
    std::string_view end, start;
    int group = 0;
    for (const auto& [g, s] : open)
      for (const DelimiterPair& pair : spec.groups[size_t(g)])
        if (pair.end.size() > end.size() && pair.start == s && here(at, pair.end)) end = pair.end;
    for (size_t g = 0; g < spec.groups.size(); g++)
      for (const DelimiterPair& pair : spec.groups[g])
        if (pair.start.size() > start.size() && here(at, pair.start)) start = pair.start, group = int(g);
    if (!end.empty()) {
      while (!has_end(open.back(), end)) open.pop_back();
      open.pop_back();
      at += end.size();
    } else if (!start.empty() && int(open.size()) < spec.max_nesting) {
      open.push_back({group, start});
      at += start.size();
    } else {
      at++;
    }
  }
  std::vector<int> blocks;
  for (const auto& [g, s] : open) blocks.push_back(1 + g);
  return blocks;
}

size_t compiled = 0;

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string input(reinterpret_cast<const char*>(data), size);
  const std::string string = input.substr(0, input.find('\0'));
  StructureSpec spec;
  try {
    spec = parse_structure(string);
  } catch (const StructureError& error) {
    if (error.position > string.size()) std::abort();
    return 0;
  }
  compiled++;
  const Structure structure(spec);
  const std::string text = string.size() < size ? input.substr(string.size() + 1, 200) : "";
  const bool exact = string.find("<") == std::string::npos;
  BlockState state;
  int depth = 0, block = 0;
  for (size_t i = 0; i < text.size(); i++) {
    structure.feed(state, std::string_view(text).substr(i, 1));
    if (!structure.valid(state)) std::abort();
    int open[kMaxNesting];
    const int n = structure.open_blocks(state, open);
    if (structure.block(state) != (n > 0 ? open[n - 1] : 0)) std::abort();
    const bool changed = n != depth || structure.block(state) != block;
    depth = n;
    block = structure.block(state);
    if (!exact || !(changed || i % 8 == text.size() % 8)) continue;
    if (std::vector<int>(open, open + n) != open_afresh(spec, std::string_view(text).substr(0, i + 1))) std::abort();
  }
  return 0;
}

#ifndef SPECEYES_LIBFUZZER
int main(int argc, char** argv) {
  if (argc != 3) return 2;
  std::mt19937_64 random(std::strtoull(argv[1], nullptr, 10));
  const size_t executions = std::strtoull(argv[2], nullptr, 10);
  const auto below = [&](size_t n) { return size_t(random() % n); };
  const std::string symbols = "[](){}'\"\\,:ab$`<>/ntux0189 \xC3\xA9";
  const std::vector<std::string> good = {
      "[[('```', '```'), ('$$', '$$')], [('$', '$')]]", "[[('aab', 'ba'), ('ab', 'a')], [('b', 'bb')]]",
      "{\"groups\": [[[\"\\u00e9\", \"\\ud83d\\ude00\"]], [[\"a\", \"aa\"]]], \"max_nesting\": 3}",
      "[[('<tool>', '<\\tool>')], [(\"\\x24\", \"\\n\")]]"};
  const auto word = [&] {
    std::string s;
    for (size_t n = 1 + below(5); n > 0; n--) s += "ab"[below(2)];
    return s;
  };
  for (size_t e = 0; e < executions; e++) {
    std::string input;
    if (below(2) == 0) {
      input = good[below(good.size())];
    } else {
      for (size_t g = 0, groups = 1 + below(3); g < groups; g++) {
        input += g > 0 ? ", [" : "[[";
        for (size_t p = 0, pairs = 1 + below(3); p < pairs; p++)
          input += (p > 0 ? ", ('" : "('") + word() + "', '" + word() + "')";
        input += ']';
      }
      input += ']';
    }
    for (size_t n = below(4) == 0 ? below(6) : 0; n > 0 && !input.empty(); n--) {
      const size_t at = below(input.size());
      if (below(2) == 0)
        input[at] = symbols[below(symbols.size())];
      else
        input.insert(at, 1, symbols[below(symbols.size())]);
    }
    input += '\0';
    for (size_t n = below(60); n > 0; n--) input += below(8) == 0 ? "$``\xC3<>/\\"[below(8)] : "ab"[below(2)];
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
  }
  std::printf("%zu executions held, %zu structures compiled\n", executions, compiled);
  return 0;
}
#endif
