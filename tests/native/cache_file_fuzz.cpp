// Fuzz target of the cache file's reader and of what is done with an image: any bytes are a file. It is refused with
// CacheFileError, or read to an image that can be written, shortened, merged, loaded, trimmed. Each input is read twice,
// the second time with its size and checksum put right, so that mutations reach the content.
// With clang: -fsanitize=fuzzer. Otherwise main() mutates files of real caches, their bytes or (one in sixteen) one field
// of what they hold, which a byte seldom hits: cache_file_fuzz SEED EXECUTIONS.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cache_file.h"
#include "draft_cache.h"

using namespace speceyes::drafting;

namespace {

size_t loaded = 0;

void expect(bool holds, const char* what) {
  if (holds) return;
  std::printf("not so: %s\n", what);
  std::fflush(stdout);
  std::abort();
}

bool propose(DraftCache& cache, int64_t request) {
  static Token tokens[8];
  static int32_t length;
  static float survival[8];
  return cache.propose({.requests = &request, .batch = 1, .most = 8, .caps = nullptr, .min_survival = 0,
                        .policy = Policy::kAll, .step = {}, .params = {}, .threads = 1, .tokens = tokens,
                        .lengths = &length, .survival = survival});
}

bool same_text(const CacheImage& a, const CacheImage& b) {
  return a.queries == b.queries && a.responses == b.responses && a.tokens == b.tokens && a.runs == b.runs &&
         a.blocks == b.blocks && a.max_depth == b.max_depth && a.strict_isolation == b.strict_isolation;
}

void load(const CacheImage& image) {
  CacheOptions options;
  options.max_depth = image.max_depth;
  options.strict_isolation = image.strict_isolation;
  options.max_tokens = int64_t(image.tokens.size()) + 100;
  DraftCache cache(options);
  bool tables = false;
  expect(cache.load(image, &tables).empty(), "an image that passed can be loaded");
  expect(same_text(cache.image(), image), "a cache's image is what it was loaded from");
  if (tables && image.estimator.layout != 0)
    expect(cache.image().estimator == image.estimator, "the tables are what was loaded");
  const Token prompt[] = {1, 2, 1, 2};
  cache.start(1, prompt, 4, 1, 1, nullptr);
  cache.extend(1, prompt, 4);
  cache.trim();
  expect(propose(cache, 1), "a request proposes");
  cache.stop(1);
  expect(cache.image().responses.size() == image.responses.size() + 1, "a request was added");
  loaded++;
}

void read(std::string_view file, bool and_load) {
  CacheImage image;
  try {
    image = decode(file);
  } catch (const CacheFileError& error) {
    expect(std::strlen(error.what()) > 10, "a refusal says why");
    return;
  }
  expect(decode(encode(image)) == image, "what was read is written the same");
  const CacheImage twice = merge({image, image});
  expect(check(twice).empty() && same_text(twice, image), "a file merged with itself is itself");
  CacheImage half = image;
  keep_newest(half, int64_t(image.tokens.size() / 2));
  expect(check(half).empty() && half.tokens.size() <= image.tokens.size() / 2, "a half can be kept");
  expect(check(merge({half, image})).empty(), "two that agree can be merged");
  if (and_load) load(image);
}

std::string put_right(std::string file) {
  if (file.size() < 32) return file;
  for (size_t i = 0; i < 8; i++) file[16 + i] = char(uint8_t(uint64_t(file.size()) >> 8 * i));
  const std::string_view all = file;
  const uint64_t crc = crc64(all.substr(32), crc64(all.substr(0, 24)));
  for (size_t i = 0; i < 8; i++) file[24 + i] = char(uint8_t(crc >> 8 * i));
  return file;
}

template <typename T>
T odd(T value, std::mt19937_64& random) {
  switch (random() % 6) {
    case 0: return T(uint64_t(value) + 1);
    case 1: return T(uint64_t(value) - 1);
    case 2: return T(0);
    case 3: return std::numeric_limits<T>::max();
    case 4: return T(T(1) << random() % (8 * sizeof(T)));
    default: return T(random());
  }
}

// Another value in one field, any of them as likely as any other however many bytes the file gives it.
void mutate(CacheImage& image, std::mt19937_64& random) {
  const auto any = [&](auto& list) { return list.begin() + ptrdiff_t(random() % list.size()); };
  const auto change = [&](auto& field) { field = odd(field, random); };
  EstimatorImage& learned = image.estimator;
  const auto cell = [&] { return random() % 2 ? learned.cells.end() - 1 : any(learned.cells); };
  switch (random() % 16) {
    case 0: if (!image.queries.empty()) change(any(image.queries)->responses); break;
    case 1: if (!image.queries.empty()) any(image.queries)->agent = any(image.queries)->agent; break;
    case 2: if (!image.responses.empty()) change(any(image.responses)->tokens); break;
    case 3: if (!image.responses.empty()) change(any(image.responses)->prompt); break;
    case 4: if (!image.tokens.empty()) change(*any(image.tokens)); break;
    case 5: if (!image.runs.empty()) change(any(image.runs)->response); break;
    case 6: if (!image.runs.empty()) change(any(image.runs)->tokens); break;
    case 7: if (!image.blocks.empty()) change(any(image.blocks)->block); break;
    case 8: if (!image.blocks.empty()) change(any(image.blocks)->tokens); break;
    case 9: if (!learned.cells.empty()) change(cell()->index); break;
    case 10: if (!learned.cells.empty()) cell()->p = float(random() % 5) / 4; break;
    case 11: if (!learned.cells.empty()) cell()->seen = float(random() % 1024) / 2; break;
    case 12: if (!learned.steps.empty()) change(*any(learned.steps)); break;
    case 13: change(learned.inputs); break;
    case 14: change(image.max_depth); break;
    case 15: change(random() % 2 ? image.proposed : image.evicted_tokens); break;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string file(reinterpret_cast<const char*>(data), size);
  const bool and_load = size > 0 && data[size / 2] % 64 == 0;  // making a cache takes long
  read(file, and_load);
  read(put_right(file), and_load);
  return 0;
}

#ifndef SPECEYES_LIBFUZZER
int main(int argc, char** argv) {
  if (argc != 3) return 2;
  std::mt19937_64 random(std::strtoull(argv[1], nullptr, 10));
  const size_t executions = std::strtoull(argv[2], nullptr, 10);
  const auto below = [&](size_t n) { return size_t(random() % n); };

  std::vector<std::string> files;
  const auto bytes = std::make_shared<const TokenBytes>(std::vector<char>{'a', '<', '>'}, std::vector<uint32_t>{0, 1, 2, 3});
  const auto structure = std::make_shared<const Structure>(parse_structure("[[('<', '>')], [('a', 'a')]]"));
  for (int seed = 0; seed < 12; seed++) {
    CacheOptions options;
    options.max_depth = 1 + int(below(8));
    options.strict_isolation = seed % 2;
    options.max_tokens = 30 + int64_t(below(60));
    options.token_bytes = bytes;
    DraftCache cache(options);
    for (int64_t r = 0; r < 12; r++) {
      std::vector<Token> tokens;
      for (size_t n = below(12); n > 0; n--) tokens.push_back(Token(below(4)));
      cache.start(r, tokens.data(), int64_t(tokens.size()), int64_t(below(2)), int64_t(below(3)), structure);
      for (int step = 0; step < 3; step++)
        for (int64_t other = std::max<int64_t>(0, r - 1); other <= r; other++) {
          if (!cache.knows(other)) continue;
          propose(cache, other);
          cache.extend(other, tokens.data(), int64_t(below(tokens.size() + 1)));
        }
      if (r > 0 && below(4) > 0) cache.stop(r - 1);
    }
    CacheImage image = cache.image();
    expect(check(image).empty(), "a cache's image passes");
    load(image);
    if (seed % 4 < 3) image.estimator = {};  // most bytes are the text's
    files.push_back(encode(image));
    expect(put_right(files.back()) == files.back(), "the header is as described");
  }
  const size_t first = loaded;
  for (size_t e = 0; e < executions; e++) {
    std::string file = files[below(files.size())];
    if (e % 16 == 0) {
      CacheImage image = decode(file);
      for (size_t n = 1 + below(2); n > 0; n--) mutate(image, random);
      read(encode(image), true);
      continue;
    }
    for (size_t n = 1 + below(3); n > 0 && !file.empty(); n--) {
      const size_t at = below(8) == 0 ? below(std::min<size_t>(file.size(), 32)) : below(file.size());
      switch (below(7)) {
        case 0: file[at] = char(below(256)); break;
        case 1: file[at] = char(uint8_t(file[at]) ^ (1u << below(8))); break;
        case 2: file[at] = char(uint8_t(file[at]) + (below(2) == 0 ? 1 : 255)); break;
        case 3: file.resize(at); break;
        case 4: file.erase(at, 1 + below(8)); break;
        case 5: file.insert(at, 1 + below(8), char(below(3) == 0 ? 0 : below(256))); break;
        case 6:
          for (size_t i = at; i < std::min(file.size(), at + 8); i++) file[i] = char(i < at + 4 || below(2) ? 255 : 127);
          break;
      }
    }
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(file.data()), file.size());
  }
  std::printf("%zu executions held, %zu mutated files were loaded\n", executions, loaded - first);
  return 0;
}
#endif
