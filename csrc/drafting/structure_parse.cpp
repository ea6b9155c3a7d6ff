// The request's `structure` string; its two forms are described in structure.h.
#include <algorithm>
#include <map>
#include <optional>
#include <string>

#include "structure.h"

namespace speceyes::drafting {

namespace {

void append_utf8(std::string& out, uint32_t c) {
  if (c < 0x80) {
    out += char(c);
  } else if (c < 0x800) {
    out += {char(0xC0 | c >> 6), char(0x80 | (c & 63))};
  } else if (c < 0x10000) {
    out += {char(0xE0 | c >> 12), char(0x80 | (c >> 6 & 63)), char(0x80 | (c & 63))};
  } else {
    out += {char(0xF0 | c >> 18), char(0x80 | (c >> 12 & 63)), char(0x80 | (c >> 6 & 63)), char(0x80 | (c & 63))};
  }
}

bool is_surrogate(uint32_t c) { return c >= 0xD800 && c < 0xE000; }
bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  StructureSpec parse() {
    if (text_.size() > size_t(kMaxStructureBytes))
      fail(0, "expected at most " + std::to_string(kMaxStructureBytes) + " bytes, got " + std::to_string(text_.size()));
    space();
    if (at_ == text_.size()) return {};
    json_ = text_[at_] == '{';
    if (json_)
      object();
    else
      groups();
    space();
    if (at_ < text_.size()) expected("the end");
    return std::move(spec_);
  }

 private:
  [[noreturn]] void fail(size_t at, const std::string& what) const {
    size_t position = 0;
    for (size_t i = 0; i < at; i++) position += (uint8_t(text_[i]) & 0xC0) != 0x80;
    throw StructureError("structure: " + what + " at character " + std::to_string(position), position);
  }
  [[noreturn]] void expected(const char* what) const {
    if (at_ >= text_.size()) fail(at_, std::string("expected ") + what + ", got the end");
    size_t end = at_ + 1;
    while (end < text_.size() && (uint8_t(text_[end]) & 0xC0) == 0x80) end++;
    fail(at_, std::string("expected ") + what + ", got '" + std::string(text_.substr(at_, end - at_)) + "'");
  }

  bool see(char c) const { return at_ < text_.size() && text_[at_] == c; }
  bool take(char c) {
    if (!see(c)) return false;
    at_++;
    return true;
  }
  void space() {
    while (at_ < text_.size() && (see(' ') || see('\t') || see('\n') || see('\r'))) at_++;
  }

  char open_list(const char* what) {
    space();
    if (take('[')) return ']';
    if (!json_ && take('(')) return ')';
    expected(what);
  }
  // After an item: true when another one follows.
  bool next_item(char close) {
    space();
    if (take(close)) return false;
    if (!take(',')) expected(close == ']' ? "',' or ']'" : close == ')' ? "',' or ')'" : "',' or '}'");
    space();
    return json_ || !take(close);
  }

  void object() {
    at_++;
    bool has_groups = false, has_nesting = false;
    const size_t begin = at_ - 1;
    space();
    if (!take('}')) {
      do {
        space();
        const size_t key_at = at_;
        const std::string key = string("a key");
        bool& seen = key == "groups" ? has_groups : has_nesting;
        if (key != "groups" && key != "max_nesting") fail(key_at, "expected the key \"groups\" or \"max_nesting\"");
        if (seen) fail(key_at, "the key \"" + key + "\" is given twice");
        seen = true;
        space();
        if (!take(':')) expected("':'");
        space();
        if (key == "groups")
          groups();
        else
          nesting();
      } while (next_item('}'));
    }
    if (!has_groups) fail(begin, "expected the key \"groups\" in the object");
  }

  void nesting() {
    const size_t begin = at_;
    int value = 0;
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9' && at_ - begin < 6)
      value = value * 10 + (text_[at_++] - '0');
    if (at_ == begin) expected("a whole number");
    if (value < 1 || value > kMaxNesting || text_[begin] == '0')
      fail(begin, "max_nesting: expected 1 to " + std::to_string(kMaxNesting));
    spec_.max_nesting = value;
  }

  void groups() {
    const char close = open_list("'[' (a list of groups)");
    space();
    if (take(close)) return;
    do {
      space();
      if (spec_.groups.size() == size_t(kMaxGroups)) fail(at_, "expected at most " + std::to_string(kMaxGroups) + " groups");
      group();
    } while (next_item(close));
  }

  void group() {
    const char close = open_list("'[' (a group: a list of pairs)");
    const int g = int(spec_.groups.size());
    spec_.groups.emplace_back();
    do {
      const char close_pair = open_list("'[' (a pair of strings)");
      space();
      const size_t start_at = at_;
      DelimiterPair pair;
      pair.start = delimiter("a string (the start delimiter)");
      const auto [owner, is_new] = group_of_start_.emplace(pair.start, g);
      if (!is_new && owner->second != g)
        fail(start_at, "this start delimiter belongs to group " + std::to_string(owner->second) + " already,");
      space();
      if (!take(',')) expected("',' (a pair is two strings)");
      space();
      pair.end = delimiter("a string (the end delimiter)");
      if (next_item(close_pair)) expected("the end of the pair (a pair is two strings)");
      spec_.groups[size_t(g)].push_back(std::move(pair));
    } while (next_item(close));
  }

  std::string delimiter(const char* what) {
    const size_t begin = at_;
    std::string s = string(what);
    if (s.empty()) fail(begin, "expected a delimiter of at least one character, got an empty string");
    if (s.size() > size_t(kMaxDelimiterBytes))
      fail(begin, "expected a delimiter of at most " + std::to_string(kMaxDelimiterBytes) + " bytes, got " +
                      std::to_string(s.size()));
    return s;
  }

  std::string string(const char* what) {
    const char quote = see('\'') && !json_ ? '\'' : '"';
    if (!take(quote)) expected(what);
    std::string out;
    for (;;) {
      if (at_ == text_.size()) expected(quote == '"' ? "'\"'" : "\"'\"");
      const char c = text_[at_];
      if (c == quote) break;
      if (json_ && uint8_t(c) < 0x20) fail(at_, "expected no control character in a JSON string");
      if (c != '\\') {
        out += c;
        at_++;
      } else if (json_) {
        json_escape(out);
      } else {
        list_escape(out);
      }
    }
    at_++;
    return out;
  }

  std::optional<uint32_t> hex(size_t at, int digits) const {
    uint32_t value = 0;
    if (at + size_t(digits) > text_.size()) return {};
    for (size_t i = at; i < at + size_t(digits); i++) {
      const char c = text_[i];
      const char lower = char(c | 0x20);
      if (c >= '0' && c <= '9')
        value = value * 16 + uint32_t(c - '0');
      else if (lower >= 'a' && lower <= 'f')
        value = value * 16 + uint32_t(lower - 'a' + 10);
      else
        return {};
    }
    return value;
  }

  void list_escape(std::string& out) {
    const char c = at_ + 1 < text_.size() ? text_[at_ + 1] : '\0';
    const bool closing_tag = !out.empty() && out.back() == '<' && is_letter(c);
    const int digits = c == 'x' ? 2 : c == 'u' ? 4 : 0;
    if (c == '\\' || c == '\'' || c == '"') {
      out += c;
      at_ += 2;
    } else if (c == 'n' && !closing_tag) {
      out += '\n';
      at_ += 2;
    } else if (const auto value = hex(at_ + 2, digits); digits > 0 && !closing_tag && value) {
      if (is_surrogate(*value)) fail(at_, "expected a character, got half of a surrogate pair");
      append_utf8(out, *value);
      at_ += 2 + size_t(digits);
    } else {
      out += '\\';
      at_++;
    }
  }

  void json_escape(std::string& out) {
    static constexpr std::string_view kFrom = "\"\\/bfnrt", kTo = "\"\\/\b\f\n\r\t";
    const size_t begin = at_++;
    if (at_ < text_.size()) {
      if (const size_t k = kFrom.find(text_[at_]); k != kFrom.npos) {
        out += kTo[k];
        at_++;
        return;
      }
    }
    auto value = see('u') ? hex(at_ + 1, 4) : std::nullopt;
    if (!value) fail(begin, "expected a JSON escape (a backslash in a JSON string is written twice)");
    at_ += 5;
    if (*value >= 0xD800 && *value < 0xDC00 && text_.substr(at_, 2) == "\\u") {
      const auto low = hex(at_ + 2, 4);
      if (low && *low >= 0xDC00 && *low < 0xE000) {
        value = 0x10000 + ((*value - 0xD800) << 10) + (*low - 0xDC00);
        at_ += 6;
      }
    }
    if (is_surrogate(*value)) fail(begin, "expected a character, got half of a surrogate pair");
    append_utf8(out, *value);
  }

  std::string_view text_;
  size_t at_ = 0;
  bool json_ = false;
  StructureSpec spec_;
  std::map<std::string, int> group_of_start_;
};

}  // namespace

StructureSpec parse_structure(std::string_view text) { return Parser(text).parse(); }

}  // namespace speceyes::drafting
