// Files of a draft cache. All numbers are little-endian:
//   bytes 0-7    magic: 0x89 "SPDC" CR LF 0x1A, so that a transfer as text is seen
//   8-11, 12-15  format version, reserved (0)
//   16-23        size of the whole file
//   24-31        CRC-64/XZ of bytes 0-23 and of all bytes from 32 on
//   from 32      the image, see encode()
// A file does not depend on how the forest is laid out, and is the same for every process: names of agents and queries
// are in it as stable 63-bit hashes.
#pragma once
#include <stdexcept>
#include <string>
#include <string_view>

#include "cache_image.h"

namespace speceyes::drafting {

// What a file is not: no cache file, cut short, damaged, from a newer version. Trouble with the file system is a
// std::system_error.
struct CacheFileError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

constexpr uint32_t kCacheFileVersion = 1;

std::string encode(const CacheImage& image);
// Bytes of a whole file. Counts are held against the bytes that are there before room is made for them. Throws
// CacheFileError.
CacheImage decode(std::string_view file);

// Replaces `path` in one step: whoever opens it, or finds it after a crash, has the old file or the new one, whole. A
// crash may leave a hidden temporary file beside it. Any number of processes may save to one path; the last one stays.
void write_cache_file(const std::string& path, const CacheImage& image);
CacheImage read_cache_file(const std::string& path);

uint64_t crc64(std::string_view bytes, uint64_t crc = 0);

}  // namespace speceyes::drafting
