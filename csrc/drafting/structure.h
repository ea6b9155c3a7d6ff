// Semantic blocks of a request's text: a string pushdown automaton over bytes, whose innermost open block says where a
// token stands (code, tool call, math, nothing). Rules, in full:
//
// A structure is a list of groups of (start, end) delimiter pairs. Pairs of one group that share their start are one
// kind of block with several ends. Text is read from the left; at a byte position these delimiters are live:
//   ends    of any open block; the longest that matches here closes the innermost open block that has it, and all
//           blocks inside that one (they were never closed);
//   starts  of any kind, unless no end matches or `max_nesting` blocks are open; the longest that matches here opens.
// What matched is consumed, otherwise one byte is. So a block's own end wins over every start, a longer one included
// (`$a$$b$` is two blocks, as in TeX); start equal to end closes when open; between blocks `$$` wins over `$`.
// A closing tag misspelt with a backslash (`<tool>` .. `<\tool>`) also closes as `</tool>`.
//
// block() after any bytes is what these rules give when the text ends there: after `$` the block is `$`, and when the
// next byte makes it `$$` it is `$$`. It depends on the bytes alone, never on how tokens cut them.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "text_store.h"

namespace speceyes::drafting {

constexpr int kMaxNesting = 16, kDefaultNesting = 8;
constexpr int kMaxGroups = 64, kMaxDelimiterBytes = 128, kMaxStructureBytes = 8192;

struct DelimiterPair {
  std::string start, end;
};

struct StructureSpec {
  std::vector<std::vector<DelimiterPair>> groups;
  int max_nesting = kDefaultNesting;
};

// A structure string that is refused; `position` counts characters (UTF-8 code points) from 0.
struct StructureError : std::invalid_argument {
  StructureError(const std::string& message, size_t at) : std::invalid_argument(message), position(at) {}
  size_t position;
};

// Reads a request's `structure` (UTF-8). Two forms:
//   lists   [[("```", "```"), ("<tool>", "</tool>")], [("$$", "$$"), ("$", "$")]]   groups of pairs; ( ) and [ ] are
//           equal, quotes are ' or ", a comma may follow the last item. A backslash is itself, but for \\ \' \" \n \xHH
//           \uHHHH; between `<` and a letter it is always itself (the misspelt closing tag).
//   JSON    {"groups": [[["```", "```"]], ...], "max_nesting": 8}   strict JSON strings; max_nesting may be absent
// Nothing but white space, or no group, is a structure without blocks. One start in two groups is refused.
// Throws StructureError.
StructureSpec parse_structure(std::string_view text);

// Where a text stands. Plain data: a draft that runs ahead copies it and throws the copy away.
struct BlockState {
  uint32_t pending = 0;  // trie node of the bytes that are not decided yet
  uint16_t depth = 0;
  uint16_t open[kMaxNesting] = {};  // kinds, outermost first
};

// A compiled structure: immutable, shared by any number of states and threads.
class Structure {
 public:
  explicit Structure(const StructureSpec& spec);

  int num_groups() const { return num_groups_; }
  int max_nesting() const { return max_nesting_; }
  // Constant work a byte; the bound is the longest delimiter, reached only where delimiters overlap.
  void feed(BlockState& s, std::string_view bytes) const {
    for (const char c : bytes) {
      const int32_t next = step_[s.pending * uint32_t(classes_) + class_of_[uint8_t(c)]];
      if (next >= 0)
        s.pending = uint32_t(next);
      else
        settle(s, uint8_t(c));
    }
  }
  // 0 outside of every block, 1 + group inside the innermost.
  int block(const BlockState& s) const {
    if (s.pending != 0) return block_when_ended(s);
    return s.depth == 0 ? 0 : 1 + kind_[s.open[s.depth - 1]].group;
  }
  // Blocks of every open level, outermost first; returns how many (at most kMaxNesting).
  int open_blocks(const BlockState& s, int* out) const;
  // False for a state that this structure cannot have produced.
  bool valid(const BlockState& s) const;

  size_t bytes() const;

 private:
  struct Kind {
    int group;
    std::vector<uint32_t> ends;  // trie nodes
  };
  struct Node {
    uint32_t parent, fail;
    uint32_t path;  // the node's bytes are path_[path, path + depth)
    uint16_t depth;
    uint8_t byte;
    bool leaf = true, is_end = false;
    bool inner = false;  // a delimiter lies somewhere in the node's bytes
    int32_t kind = -1;   // that starts here
  };

  uint32_t put(std::string_view delimiter);
  void link();
  int32_t child(uint32_t node, uint8_t byte) const;
  int closes(const BlockState& s, uint32_t end) const;
  void settle(BlockState& s, uint8_t byte) const;
  void read(BlockState& s, const uint8_t* text, int n, bool ended) const;
  BlockState when_ended(const BlockState& s) const;
  int block_when_ended(const BlockState& s) const;

  int num_groups_, max_nesting_, classes_ = 1;
  uint8_t class_of_[256] = {};  // bytes that no delimiter has are class 0
  std::vector<Kind> kind_;
  std::vector<Node> node_;
  std::vector<uint8_t> path_;
  // [node, class]: the next node, or that the byte decides something: kDecide, or kDecide - 1 - n at a child n without
  // children of its own.
  static constexpr int32_t kDecide = -1;
  std::vector<int32_t> step_;
};

// Bytes of every token, made once and shared.
class TokenBytes {
 public:
  TokenBytes() = default;
  TokenBytes(std::vector<char> bytes, std::vector<uint32_t> begin) : bytes_(std::move(bytes)), begin_(std::move(begin)) {}
  // A token outside of the table (a placeholder, an added token) has no bytes.
  std::string_view operator[](Token t) const {
    if (t < 0 || size_t(t) + 1 >= begin_.size()) return {};
    return {bytes_.data() + begin_[size_t(t)], begin_[size_t(t) + 1] - begin_[size_t(t)]};
  }
  size_t size() const { return begin_.empty() ? 0 : begin_.size() - 1; }
  size_t bytes() const { return bytes_.capacity() + begin_.capacity() * sizeof(uint32_t); }

 private:
  std::vector<char> bytes_;
  std::vector<uint32_t> begin_;
};

}  // namespace speceyes::drafting
