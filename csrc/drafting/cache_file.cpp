#include "cache_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <system_error>

namespace speceyes::drafting {

namespace {

constexpr std::string_view kMagic{"\x89SPDC\r\n\x1A", 8};
constexpr size_t kHeader = 32, kCrcAt = 24;

[[noreturn]] void refuse(const std::string& what) { throw CacheFileError(what); }

// Slice i, entry b: the CRC of byte b followed by i zero bytes.
using CrcTables = std::array<std::array<uint64_t, 256>, 8>;
constexpr CrcTables make_crc_tables() {
  CrcTables t{};
  for (uint64_t b = 0; b < 256; b++) {
    uint64_t c = b;
    for (int k = 0; k < 8; k++) c = (c & 1) != 0 ? (c >> 1) ^ 0xC96C5795D7870F42ull : c >> 1;
    t[0][b] = c;
  }
  for (size_t i = 1; i < 8; i++)
    for (size_t b = 0; b < 256; b++) t[i][b] = (t[i - 1][b] >> 8) ^ t[0][t[i - 1][b] & 255];
  return t;
}
constexpr CrcTables kCrc = make_crc_tables();

class Writer {
 public:
  template <class T>
  void fixed(T value) {
    for (size_t i = 0; i < sizeof(T); i++) out.push_back(char(uint8_t(uint64_t(value) >> 8 * i)));
  }
  void real(float value) { fixed(std::bit_cast<uint32_t>(value)); }
  void varint(uint64_t value) {
    for (; value >= 128; value >>= 7) out.push_back(char(uint8_t(value | 128)));
    out.push_back(char(uint8_t(value)));
  }
  std::string out;
};

class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}
  size_t left() const { return bytes_.size() - at_; }
  template <class T>
  T fixed() {
    need(sizeof(T));
    uint64_t value = 0;
    for (size_t i = 0; i < sizeof(T); i++) value |= uint64_t(uint8_t(bytes_[at_ + i])) << 8 * i;
    at_ += sizeof(T);
    return T(value);
  }
  float real() { return std::bit_cast<float>(fixed<uint32_t>()); }
  uint32_t varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 35; shift += 7) {
      const uint8_t byte = fixed<uint8_t>();
      value |= uint64_t(byte & 127) << shift;
      if (byte < 128 && value <= UINT32_MAX) return uint32_t(value);
      if (byte < 128) break;
    }
    refuse("a number above 2^32 - 1");
  }
  // How many items follow, each at least `least` bytes long.
  size_t count(size_t least) {
    const uint64_t n = fixed<uint64_t>();
    if (n > left() / least) refuse("a count of " + std::to_string(n) + " where " + std::to_string(left()) + " bytes are left");
    return size_t(n);
  }

 private:
  void need(size_t n) const {
    if (left() < n) refuse("its content ends early");
  }
  std::string_view bytes_;
  size_t at_ = 0;
};

uint64_t file_crc(std::string_view file) { return crc64(file.substr(kHeader), crc64(file.substr(0, kCrcAt))); }

void check_header(std::string_view head, uint64_t size) {
  if (size == 0) refuse("expected a cache file of speceyes_kernels, got an empty file");
  const auto n = std::min(head.size(), kMagic.size());
  if (head.substr(0, n) != kMagic.substr(0, n))
    refuse("expected a cache file of speceyes_kernels, got a file of another kind (its first bytes differ)");
  if (size < kHeader) refuse("the file is cut short: " + std::to_string(size) + " bytes, and the header alone takes 32");
  Reader r(head.substr(kMagic.size()));
  const auto version = r.fixed<uint32_t>();
  if (version > kCacheFileVersion)
    refuse("the file has format version " + std::to_string(version) + ", and this speceyes_kernels reads up to " +
           std::to_string(kCacheFileVersion) + "; update speceyes_kernels");
  if (version == 0) refuse("the file is damaged: format version 0");
  r.fixed<uint32_t>();
  const auto expected = r.fixed<uint64_t>();
  if (size < expected)
    refuse("the file is cut short: " + std::to_string(size) + " bytes of " + std::to_string(expected));
  if (size > expected)
    refuse("the file is damaged: " + std::to_string(size) + " bytes, and its header says " + std::to_string(expected));
}

CacheImage decode_body(Reader r) {
  CacheImage image;
  image.max_depth = r.fixed<int32_t>();
  const auto strict = r.fixed<uint32_t>();
  if (strict > 1) refuse("strict_isolation is " + std::to_string(strict));
  image.strict_isolation = strict != 0;
  for (int64_t* n : {&image.evicted_tokens, &image.proposed, &image.accepted, &image.verified, &image.judged}) *n = r.fixed<int64_t>();
  image.queries.resize(r.count(17));
  for (auto& q : image.queries) {
    q.agent = r.fixed<int64_t>();
    q.query = r.fixed<int64_t>();
    q.responses = r.varint();
  }
  image.responses.resize(r.count(2));
  for (auto& x : image.responses) {
    x.tokens = r.varint();
    x.prompt = r.varint();
  }
  image.tokens.resize(r.count(4));
  for (Token& t : image.tokens) t = r.fixed<int32_t>();
  image.runs.resize(r.count(2));
  for (auto& x : image.runs) {
    x.response = r.varint();
    x.tokens = r.varint();
  }
  image.blocks.resize(r.count(2));
  for (auto& x : image.blocks) {
    x.block = int32_t(r.varint());
    x.tokens = r.varint();
  }
  EstimatorImage& e = image.estimator;
  e.layout = r.fixed<uint32_t>();
  e.cells.resize(r.count(12));
  for (auto& c : e.cells) {
    c.index = r.fixed<uint32_t>();
    c.p = r.real();
    c.seen = r.real();
  }
  e.inputs = r.fixed<uint32_t>();
  e.weights.resize(r.count(4));
  for (float& w : e.weights) w = r.real();
  e.steps.resize(r.count(8));
  for (uint64_t& n : e.steps) n = r.fixed<uint64_t>();
  if (r.left() > 0) refuse(std::to_string(r.left()) + " bytes too many");
  const std::string wrong = check(image);
  if (!wrong.empty()) refuse("contradiction in " + wrong);
  return image;
}

}  // namespace

uint64_t crc64(std::string_view bytes, uint64_t crc) {
  crc = ~crc;
  size_t i = 0;
  for (; i + 8 <= bytes.size(); i += 8) {
    uint64_t word = 0;
    for (size_t k = 0; k < 8; k++) word |= uint64_t(uint8_t(bytes[i + k])) << 8 * k;
    crc ^= word;
    uint64_t next = 0;
    for (size_t k = 0; k < 8; k++) next ^= kCrc[7 - k][crc >> 8 * k & 255];
    crc = next;
  }
  for (; i < bytes.size(); i++) crc = (crc >> 8) ^ kCrc[0][(crc ^ uint8_t(bytes[i])) & 255];
  return ~crc;
}

std::string encode(const CacheImage& image) {
  Writer w;
  w.out.reserve(kHeader + 256 + image.queries.size() * 20 + image.responses.size() * 4 + image.tokens.size() * 4 +
                image.runs.size() * 5 + image.blocks.size() * 3 + image.estimator.cells.size() * 12);
  w.out += kMagic;
  w.fixed(kCacheFileVersion);
  w.fixed(uint32_t(0));
  w.fixed(uint64_t(0));  // size and checksum: when they are known
  w.fixed(uint64_t(0));
  w.fixed(image.max_depth);
  w.fixed(uint32_t(image.strict_isolation));
  for (const int64_t n : {image.evicted_tokens, image.proposed, image.accepted, image.verified, image.judged}) w.fixed(n);
  w.fixed(uint64_t(image.queries.size()));
  for (const auto& q : image.queries) {
    w.fixed(q.agent);
    w.fixed(q.query);
    w.varint(q.responses);
  }
  w.fixed(uint64_t(image.responses.size()));
  for (const auto& x : image.responses) {
    w.varint(x.tokens);
    w.varint(x.prompt);
  }
  w.fixed(uint64_t(image.tokens.size()));
  for (const Token t : image.tokens) w.fixed(t);
  w.fixed(uint64_t(image.runs.size()));
  for (const auto& x : image.runs) {
    w.varint(x.response);
    w.varint(x.tokens);
  }
  w.fixed(uint64_t(image.blocks.size()));
  for (const auto& x : image.blocks) {
    w.varint(uint32_t(x.block));
    w.varint(x.tokens);
  }
  const EstimatorImage& e = image.estimator;
  w.fixed(e.layout);
  w.fixed(uint64_t(e.cells.size()));
  for (const auto& c : e.cells) {
    w.fixed(c.index);
    w.real(c.p);
    w.real(c.seen);
  }
  w.fixed(e.inputs);
  w.fixed(uint64_t(e.weights.size()));
  for (const float x : e.weights) w.real(x);
  w.fixed(uint64_t(e.steps.size()));
  for (const uint64_t n : e.steps) w.fixed(n);

  Writer size, crc;
  size.fixed(uint64_t(w.out.size()));
  w.out.replace(kCrcAt - 8, 8, size.out);
  crc.fixed(file_crc(w.out));
  w.out.replace(kCrcAt, 8, crc.out);
  return std::move(w.out);
}

CacheImage decode(std::string_view file) {
  check_header(file.substr(0, kHeader), file.size());
  if (Reader(file.substr(kCrcAt)).fixed<uint64_t>() != file_crc(file)) refuse("the file is damaged: its checksum is wrong");
  try {
    return decode_body(Reader(file.substr(kHeader)));
  } catch (const CacheFileError& error) {
    refuse(std::string("the file is damaged: ") + error.what());
  }
}

// ---- the file system --------------------------------------------------------------------------------------------------
namespace {

[[noreturn]] void fail(const char* call) { throw std::system_error(errno, std::generic_category(), call); }

struct Descriptor {
  int fd;
  explicit Descriptor(int f) : fd(f) {}
  Descriptor(const Descriptor&) = delete;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

// Symbolic links are followed: what they point to is replaced, not the link.
std::string target_of(const std::string& path) {
  const std::unique_ptr<char, void (*)(void*)> real(::realpath(path.c_str(), nullptr), std::free);
  if (real != nullptr) return real.get();
  if (errno != ENOENT) fail("realpath");
  return path;
}

void write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail("write");
    bytes.remove_prefix(size_t(n));
  }
}

}  // namespace

void write_cache_file(const std::string& path, const CacheImage& image) {
  static std::atomic<uint64_t> number{0};
  const std::string bytes = encode(image), target = target_of(path);
  const size_t slash = target.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : slash == 0 ? "/" : target.substr(0, slash);
  const std::string name = slash == std::string::npos ? target : target.substr(slash + 1);
  std::string temporary;
  int fd = -1;
  do {  // the name of a process that crashed may have come again
    temporary = folder + "/." + name + "." + std::to_string(::getpid()) + "." + std::to_string(number++) + ".tmp";
    fd = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  } while (fd < 0 && errno == EEXIST);
  if (fd < 0) fail("open");
  const Descriptor file(fd);
  try {
    write_all(fd, bytes);
    if (::fsync(fd) != 0) fail("fsync");
    if (::rename(temporary.c_str(), target.c_str()) != 0) fail("rename");
  } catch (...) {
    const int error = errno;
    ::unlink(temporary.c_str());
    errno = error;
    throw;
  }
  const Descriptor at(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (at.fd < 0) fail("open");
  if (::fsync(at.fd) != 0 && errno != EINVAL) fail("fsync");  // some file systems cannot
}

CacheImage read_cache_file(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));  // a pipe must not block
  if (file.fd < 0) fail("open");
  struct stat status;
  if (::fstat(file.fd, &status) != 0) fail("fstat");
  if (S_ISDIR(status.st_mode)) {
    errno = EISDIR;
    fail("open");
  }
  if (!S_ISREG(status.st_mode)) refuse("expected a cache file of speceyes_kernels, got no regular file");
  std::string bytes;
  const auto read_to = [&](size_t size) {
    size_t at = bytes.size();
    bytes.resize(size);
    while (at < size) {
      const ssize_t n = ::read(file.fd, bytes.data() + at, size - at);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) fail("read");
      if (n == 0) refuse("the file is cut short: it shrank while it was read");
      at += size_t(n);
    }
  };
  read_to(std::min(size_t(status.st_size), kHeader));
  check_header(bytes, uint64_t(status.st_size));  // before room is made for the rest
  read_to(size_t(status.st_size));
  return decode(bytes);
}

}  // namespace speceyes::drafting
