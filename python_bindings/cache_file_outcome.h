// Ops on cache files: a refused file is an answer, not an exception.
#pragma once
#include <cstdint>
#include <string>
#include <system_error>
#include <tuple>

#include "../csrc/drafting/cache_file.h"

namespace speceyes::binding {

using Outcome = std::tuple<int64_t, std::string>;  // errno and message; (0, "") when all went well

// fn() returns why it refuses, or nothing.
template <class Fn>
Outcome outcome_of(Fn fn) {
  try {
    return {0, fn()};
  } catch (const drafting::CacheFileError& error) {
    return {0, error.what()};
  } catch (const std::system_error& error) {
    return {error.code().value(), error.what()};
  }
}

}  // namespace speceyes::binding
