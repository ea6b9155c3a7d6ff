#include "structure.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

namespace speceyes::drafting {

namespace {

// The closing tag that a misspelt one means, or nothing. Where the string came through an unescaping reader, the
// backslash and the letter after it may have become one control character.
std::string corrected(const std::string& start, const std::string& end) {
  if (start.size() < 2 || start[0] != '<' || end.size() < 3 || end[0] != '<' || end.back() != '>') return {};
  std::string tail;
  if (end[1] == '\\') {
    tail = end.substr(2);
  } else {
    constexpr std::pair<char, char> kUnescaped[] = {
        {'\a', 'a'}, {'\b', 'b'}, {'\f', 'f'}, {'\n', 'n'}, {'\r', 'r'}, {'\t', 't'}, {'\v', 'v'}};
    for (const auto& [control, letter] : kUnescaped)
      if (end[1] == control) tail = letter + end.substr(2);
  }
  const std::string_view name = std::string_view(tail).substr(0, tail.empty() ? 0 : tail.size() - 1);
  if (name.empty() || std::string_view(start).substr(1, name.size()) != name) return {};
  return "</" + tail;
}

}  // namespace

Structure::Structure(const StructureSpec& spec)
    : num_groups_(int(spec.groups.size())), max_nesting_(std::clamp(spec.max_nesting, 1, kMaxNesting)) {
  node_.push_back({0, 0, 0, 0, 0});
  for (const auto& group : spec.groups)
    for (const auto& pair : group)
      for (const std::string* s : {&pair.start, &pair.end})
        for (const char c : *s)
          if (uint8_t& k = class_of_[uint8_t(c)]; k == 0 && classes_ < 256) k = uint8_t(classes_++);
  if (uint8_t& slash = class_of_[uint8_t('/')]; slash == 0 && classes_ < 256) slash = uint8_t(classes_++);
  for (int g = 0; g < num_groups_; g++) {
    for (const DelimiterPair& pair : spec.groups[size_t(g)]) {
      const uint32_t start = put(pair.start);
      if (node_[start].kind < 0) {
        node_[start].kind = int32_t(kind_.size());
        kind_.push_back({g, {}});
      }
      Kind& kind = kind_[size_t(node_[start].kind)];
      for (const std::string& end : {pair.end, corrected(pair.start, pair.end)}) {
        if (end.empty()) continue;
        const uint32_t n = put(end);
        node_[n].is_end = true;
        if (std::find(kind.ends.begin(), kind.ends.end(), n) == kind.ends.end()) kind.ends.push_back(n);
      }
    }
  }
  link();
}

// Before link() the trie's edges lie in step_ alone, one row a node.
uint32_t Structure::put(std::string_view delimiter) {
  const uint32_t path = uint32_t(path_.size());
  path_.insert(path_.end(), delimiter.begin(), delimiter.end());
  if (step_.empty()) step_.assign(size_t(classes_), -1);
  uint32_t at = 0;
  for (const char c : delimiter) {
    const size_t slot = at * size_t(classes_) + class_of_[uint8_t(c)];
    if (step_[slot] < 0) {
      step_[slot] = int32_t(node_.size());
      node_[at].leaf = false;
      node_.push_back({at, 0, path, uint16_t(node_[at].depth + 1), uint8_t(c)});
      step_.resize(node_.size() * size_t(classes_), -1);
    }
    at = uint32_t(step_[slot]);
  }
  return at;
}

// Nodes in breadth-first order: failure links (the longest proper suffix that is a path), then the steps that need no
// decision. A node that has a delimiter inside decides whenever its path ends.
void Structure::link() {
  if (step_.empty()) step_.assign(size_t(classes_), -1);
  std::vector<uint32_t> order = {0};
  const std::vector<int32_t> trie = step_;
  for (size_t i = 0; i < order.size(); i++) {
    const uint32_t n = order[i];
    Node& node = node_[n];
    if (n != 0) {
      uint32_t fail = node.parent;
      const size_t c = class_of_[node.byte];
      node.fail = 0;
      while (fail != 0) {
        fail = node_[fail].fail;
        if (const int32_t t = trie[fail * size_t(classes_) + c]; t >= 0) {
          node.fail = uint32_t(t);
          break;
        }
      }
      node.inner = node.kind >= 0 || node.is_end || node_[node.parent].inner || node_[node.fail].inner;
    }
    for (size_t c = 0; c < size_t(classes_); c++) {
      int32_t& step = step_[n * size_t(classes_) + c];
      if (step >= 0) {
        order.push_back(uint32_t(step));
        if (node_[size_t(step)].leaf) step = kDecide - 1 - step;
      } else if (n == 0) {
        step = 0;
      } else if (!node.inner) {
        // The failure's own steps are final already: it is nearer to the root. A leaf there decides here as well.
        step = step_[node.fail * size_t(classes_) + c];
        if (step < 0) step = kDecide;
      }
    }
  }
}

int32_t Structure::child(uint32_t node, uint8_t byte) const {
  int32_t t = step_[node * size_t(classes_) + class_of_[byte]];
  if (t < kDecide) t = kDecide - 1 - t;
  return t > 0 && node_[size_t(t)].parent == node ? t : -1;
}

// The depth that closing with `end` leaves, or -1 when no open block has this end.
int Structure::closes(const BlockState& s, uint32_t end) const {
  for (int d = s.depth - 1; d >= 0; d--) {
    const auto& ends = kind_[s.open[d]].ends;
    if (std::find(ends.begin(), ends.end(), end) != ends.end()) return d;
  }
  return -1;
}

// The rules of the header on text[0, n). Unless the text has ended, it stops where more bytes may make a delimiter.
void Structure::read(BlockState& s, const uint8_t* text, int n, bool ended) const {
  for (int at = 0; at < n;) {
    uint32_t node = 0;
    int end_length = 0, left = 0, start_length = 0, kind = 0, i = at;
    for (; i < n; i++) {
      const int32_t next = child(node, text[i]);
      if (next < 0) break;
      node = uint32_t(next);
      if (node_[node].is_end)
        if (const int d = closes(s, node); d >= 0) end_length = i - at + 1, left = d;
      if (node_[node].kind >= 0 && s.depth < max_nesting_) start_length = i - at + 1, kind = node_[node].kind;
    }
    if (i == n && !ended && !node_[node].leaf) {
      s.pending = node;
      return;
    }
    if (end_length > 0) {
      s.depth = uint16_t(left);
      at += end_length;
    } else if (start_length > 0) {
      s.open[s.depth++] = uint16_t(kind);
      at += start_length;
    } else {
      at++;
    }
  }
  s.pending = 0;
}

void Structure::settle(BlockState& s, uint8_t byte) const {
  const Node& node = node_[s.pending];
  uint8_t text[kMaxDelimiterBytes + 2];
  std::memcpy(text, path_.data() + node.path, node.depth);
  text[node.depth] = byte;
  read(s, text, node.depth + 1, false);
}

BlockState Structure::when_ended(const BlockState& s) const {
  BlockState copy = s;
  const Node& node = node_[s.pending];
  read(copy, path_.data() + node.path, node.depth, true);
  return copy;
}

int Structure::block_when_ended(const BlockState& s) const {
  return node_[s.pending].inner ? block(when_ended(s)) : s.depth == 0 ? 0 : 1 + kind_[s.open[s.depth - 1]].group;
}

int Structure::open_blocks(const BlockState& s, int* out) const {
  const BlockState settled = when_ended(s);
  for (int d = 0; d < settled.depth; d++) out[d] = 1 + kind_[settled.open[d]].group;
  return settled.depth;
}

bool Structure::valid(const BlockState& s) const {
  if (s.pending >= node_.size() || s.depth > max_nesting_) return false;
  return std::all_of(s.open, s.open + s.depth, [&](uint16_t kind) { return kind < kind_.size(); });
}

size_t Structure::bytes() const {
  size_t total = sizeof(*this) + path_.capacity() + step_.capacity() * sizeof(int32_t) + node_.capacity() * sizeof(Node);
  for (const Kind& kind : kind_) total += sizeof(Kind) + kind.ends.capacity() * sizeof(uint32_t);
  return total;
}

}  // namespace speceyes::drafting
